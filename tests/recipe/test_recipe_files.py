"""Every recipe that lies in recipes/ is valid, alone or composed, and described."""

import re
from pathlib import Path

import jinja2
import pytest
import yaml

from moe_finetune.data.row_forms import Former
from moe_finetune.losses.presets import PAPERS, PRESETS
from moe_finetune.recipe.schema import load_recipe

pytestmark = pytest.mark.usefixtures("p0_released")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def files(folder: str) -> list[Path]:
    found = sorted((RECIPES / folder).glob("*.yaml"))
    assert found, f"recipes/{folder} is empty"
    return found


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("part", [*files("models"), *files("methods"), *files("data")], ids=name)
def test_every_part_composes_with_the_others(part):
    parts = {
        "models": RECIPES / "models" / "deepseek_v2_lite.yaml",
        "methods": RECIPES / "methods" / "erc.yaml",
        "data": RECIPES / "data" / "esft_law.yaml",
    } | {part.parent.name: part}
    recipe = load_recipe([*parts.values(), RECIPES / "training" / "p0_lora.yaml"])
    assert recipe.method.preset == parts["methods"].stem
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
    trainer = load_recipe([model, data, training]).trainer
    rows = trainer["per_device_train_batch_size"] * trainer.get("gradient_accumulation_steps", 1)
    of_a_device = {
        "esft": 32,
        "hot_experts": 32,
        "router": 32,
        "lora": 16,
        "p0_lora": 32,
        "p0_released": 18,
    }
    assert rows == (of_a_device | {"p1_qwen3": 64 // 8, "pretrain": 64})[training.stem]


def test_there_is_a_file_and_a_described_row_for_every_preset():
    assert {path.stem for path in files("methods")} == set(PRESETS)
    readme = (RECIPES / "README.md").read_text()
    for preset in PRESETS.values():
        assert f"[`{preset.name}`](methods/{preset.name}.yaml)" in readme
        number, place = preset.source[:2], preset.source[2:]
        source = f"*{PAPERS[number].short}*{place}" if number in PAPERS else preset.source
        assert f"| {source} | {preset.shows} |" in readme


def test_recipes_and_pages_name_papers_by_their_titles():
    """P0 to P4 are this package's own numbers, which a reader cannot look up."""
    top = RECIPES.parent
    files = [*RECIPES.rglob("*.yaml"), *(top / "eval").rglob("*.yaml")]
    files += [
        file for folder in ("recipes", "docs", "eval") for file in (top / folder).rglob("*.md")
    ]
    assert len(files) > 100
    found = [
        f"{file.relative_to(top)}: {line}"
        for file in files
        for line in file.read_text().splitlines()
        if re.search(r"\bP[0-4]\b", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("data", "source", "task"),
    [
        ("paper0_code", 0, "mbpp/mbpp_local"),
        ("paper0_code", 2, "mbpp/mbpp_local"),  # held out
        ("paper0_math", 0, "gsm8k/gsm8k_local"),
        ("paper0_math", 1, "math/_boxed"),
        ("paper0_math", 2, "math/_boxed"),
    ],
)
def test_training_asks_as_the_test_asks(data, source, task):
    text = (RECIPES.parent / "eval" / "tasks" / f"{task}.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("doc_to_text:"))
    asked = jinja2.Template(yaml.safe_load(line)["doc_to_text"], keep_trailing_newline=True)
    row = {
        "text": "Add two numbers.", "test_list": ["assert f(1, 2) == 3", "assert f(4, 4) == 8"],
        "code": "def f(a, b): ...", "problem": "What is 1 + 2?", "question": "What is 1 + 2?",
        "solution": "It is 3.",
    }  # fmt: skip
    layers = ("models/deepseek_v2_lite.yaml", f"data/{data}.yaml", "training/p0_lora.yaml")
    given = load_recipe([RECIPES / file for file in layers])
    template = [*given.data.train, *given.data.validation][source].template
    assert Former("prompt_completion", template=template)("a:1", row)["prompt"] == asked.render(row)
