"""Losses and rewards of installed packages: one that works, and ones that do not."""

import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from moe_finetune import Specialization, cli, plugins
from moe_finetune.errors import ObjectiveError, RecipeError, UnsupportedModelError
from moe_finetune.losses import TERMS
from moe_finetune.models import family_of
from moe_finetune.recipe.sections import RewardSection
from moe_finetune.training.stages.rewards import REWARDS, reward_functions
from tests.conftest import ROOT
from tests.support import registries, tiny


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package of ``tests/plugin_package``, built and installed into a folder."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "tests" / "plugin_package", folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--no-compile", "--target", folder / "site"]
    subprocess.run([*pip, *options, folder / "source"], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def plugin(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(plugins, "_installation_folders", lambda: [str(installed)])
    monkeypatch.setattr(plugins, "_installed", set())
    with registries.as_before():
        yield
    sys.modules.pop("routing_extras", None)


@pytest.mark.more
def test_an_installed_loss_trains_and_is_inspected(plugin, tmp_path, capsys):
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    batch = {**tiny.batch(), "attention_mask": torch.ones_like(tiny.batch()["input_ids"])}
    logits = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    wanted = sum(part.float().square().mean() for part in (model(**batch), logits)[1])
    weights = [layer.mlp.gate.weight for layer in model.model.layers]
    plugins.use("routing_extras")
    gradients = torch.autograd.grad(0.3 * wanted, weights)
    with Specialization(model, {"terms": {"logit_spread": {"weight": 0.3}}}):
        (0 * model(**batch).logits.sum()).backward()
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-7)

    base = tiny.save("qwen3_moe", tmp_path / "base", num_hidden_layers=2)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "Experts meet their tokens."}\n' * 8)
    tree = {"model": {"path": str(base)}, "data": {"train": str(data), "max_length": 24}}
    tree["plugins"] = ["routing_extras"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree | {"method": {"terms": {"logit_spread": {"weight": 1}}}}))
    assert cli.main(["inspect", str(base), "--recipe", str(recipe)]) == 0
    capsys.readouterr()
    recipe.write_text(yaml.safe_dump(tree | {"method": {"terms": {"logit_spred": {"weight": 1}}}}))
    assert cli.main(["inspect", str(base), "--recipe", str(recipe)]) == 2
    assert "did you mean 'logit_spread'" in capsys.readouterr().err


def test_an_installed_reward_is_named_in_a_recipe(plugin):
    plugins.use("routing_extras")
    sections = [RewardSection(name="brevity"), RewardSection(name="exact_match")]
    brevity, _ = reward_functions(sections, ["prompt", "answer", "limit"])
    assert brevity(completions=["four", "longer"], limit=[4, 5]) == [1.0, 0.0]
    with pytest.raises(RecipeError, match=r"rewards: 'brevity' failed: TypeError.*limit"):
        brevity(completions=["four"])


@pytest.mark.parametrize(
    ("group", "look", "error"),
    [
        ("losses", lambda: TERMS["odd"], ObjectiveError),
        ("rewards", lambda: REWARDS["odd"], RecipeError),
        ("families", lambda: family_of({"model_type": "odd"}), UnsupportedModelError),
    ],
)
def test_an_entry_point_of_before_is_named(group, look, error, tmp_path, monkeypatch):
    info = tmp_path / "old-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moe_finetune.{group}]\nodd = old:odd\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(error, match=rf"moe_finetune\.{group} of old:odd is not read.*\.plugins"):
        look()


@pytest.mark.parametrize(
    ("registry", "name", "value", "problem"),
    [
        (TERMS, "variance", TERMS["z_loss"], "loss term 'variance' is already registered"),
        (TERMS, "odd", 1, "is 1, and must be a subclass of .*Term"),
        (TERMS, "odd", TERMS["z_loss"], "its class has the name 'z_loss'"),
        (REWARDS, "boxed", len, "reward 'boxed' is already registered"),
        (REWARDS, "odd", "text", "must be a function"),
    ],
)
def test_what_cannot_be_registered_is_named(registry, name, value, problem):
    with pytest.raises(ValueError, match=problem):
        registry.register(name, value)
