"""Every recipe that lies in recipes/ is valid, alone or composed, and described."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def files(folder: str) -> list[Path]:
    found = sorted((RECIPES / folder).glob("*.yaml"))
    assert found, f"recipes/{folder} is empty"
    return found


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("data", files("data"), ids=name)
@pytest.mark.parametrize("model", files("models"), ids=name)
def test_models_compose_with_data_and_every_method(model, data):
    for method in files("methods"):
        for training in (RECIPES / "training" / "p0_lora.yaml",):
            recipe = load_recipe([model, method, data, training])
            assert recipe.method.preset == method.stem
            assert recipe.model.path and recipe.data.train
            assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (32, 128)


@pytest.mark.parametrize("path", files("."), ids=name)
def test_full_recipes_only_compose(path):
    recipe = load_recipe(path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1 and lines[0].startswith("extends:")
    assert recipe.lora is not None and recipe.trainer["seed"] == 42


@pytest.mark.parametrize("training", files("training"), ids=name)
def test_training_settings_compose(training):
    model, data = RECIPES / "models/deepseek_v2_lite.yaml", RECIPES / "data/esft_law.yaml"
    assert load_recipe([model, data, training]).trainer["gradient_accumulation_steps"] == 8


def test_there_is_a_file_and_a_described_row_for_every_preset():
    assert {path.stem for path in files("methods")} == set(PRESETS)
    readme = (RECIPES / "README.md").read_text()
    for preset in PRESETS.values():
        assert f"[`{preset.name}`](methods/{preset.name}.yaml)" in readme
        assert f"| {preset.source} | {preset.shows} |" in readme


@pytest.mark.parametrize("path", files("hardware"), ids=name)
def test_accelerate_reads_the_hardware_files(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    assert config.num_processes % config.num_machines == 0
