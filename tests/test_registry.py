"""Losses and rewards of installed packages: one that works, and ones that do not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moe_finetune import Specialization, cli
from moe_finetune.errors import ObjectiveError, PluginError, RecipeError
from moe_finetune.losses import TERMS
from moe_finetune.recipe.sections import RewardSection
from moe_finetune.registry import Registry
from moe_finetune.training.rewards import REWARDS, reward_functions
from tests import tiny
from tests.conftest import ROOT


@pytest.fixture
def fresh():
    """The registries look for installed packages again, before and after."""

    def forget():
        for registry in (TERMS, REWARDS):
            registry.__dict__.pop("_plugins", None)

    forget()
    yield
    forget()


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
def plugin(installed, fresh, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))


def test_an_installed_loss_trains_and_is_inspected(plugin, tmp_path, capsys):
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    batch = {**tiny.batch(), "attention_mask": torch.ones_like(tiny.batch()["input_ids"])}
    logits = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    wanted = sum(part.float().square().mean() for part in (model(**batch), logits)[1])
    weights = [layer.mlp.gate.weight for layer in model.model.layers]
    gradients = torch.autograd.grad(0.3 * wanted, weights)
    with Specialization(model, {"terms": {"logit_spread": {"weight": 0.3}}}):
        (0 * model(**batch).logits.sum()).backward()
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-7)

    base = tiny.save("qwen3_moe", tmp_path / "base", num_hidden_layers=2)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "Experts meet their tokens."}\n' * 8)
    tree = {"model": {"path": str(base)}, "data": {"train": str(data), "max_length": 24}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree | {"method": {"terms": {"logit_spread": {"weight": 1}}}}))
    assert cli.main(["inspect", str(base), "--recipe", str(recipe)]) == 0
    capsys.readouterr()
    recipe.write_text(yaml.safe_dump(tree | {"method": {"terms": {"logit_spred": {"weight": 1}}}}))
    assert cli.main(["inspect", str(base), "--recipe", str(recipe)]) == 2
    assert "did you mean 'logit_spread'" in capsys.readouterr().err


def test_an_installed_reward_is_named_in_a_recipe(plugin):
    sections = [RewardSection(name="brevity"), RewardSection(name="exact_match")]
    brevity, _ = reward_functions(sections, ["prompt", "answer", "limit"])
    assert brevity(completions=["four", "longer"], limit=[4, 5]) == [1.0, 0.0]
    with pytest.raises(RecipeError, match=r"rewards: 'brevity' failed: TypeError.*limit"):
        brevity(completions=["four"])


def install(folder: Path, monkeypatch, group: str, points: dict[str, str], code: str = "") -> None:
    """A distribution with entry points, as pip would have left it."""
    module = f"plugin_{folder.name.replace('-', '_')}"
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


LOSSES, REWARD_GROUP = (f"moe_finetune.{kind}" for kind in ("losses", "rewards"))
WRONG = {
    "taken": (
        TERMS,
        LOSSES,
        "variance",
        "x = 1",
        r"loss term 'variance' of .* already exists; rename that entry point or",
    ),
    "broken": (TERMS, LOSSES, "odd", "1 / 0", "cannot be loaded: ZeroDivisionError: .*; fix or"),
    "absent": (TERMS, LOSSES, "odd", "", "cannot be loaded: AttributeError"),
    "no-term": (TERMS, LOSSES, "odd", "x = 1", "is 1, and must be a subclass of .*Term"),
    "nameless": (
        *(TERMS, LOSSES, "odd"),
        "from moe_finetune.losses.z_loss import ZLoss as x",
        "its class has the name 'z_loss'",
    ),
    "reward-taken": (
        REWARDS,
        REWARD_GROUP,
        "boxed",
        "x = len",
        "already exists; rename that entry point or",
    ),
    "reward-type": (REWARDS, REWARD_GROUP, "odd", "x = 'text'", "must be a function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_package_that_cannot_be_used_is_named(case, fresh, tmp_path, monkeypatch):
    registry, group, name, code, message = WRONG[case]
    install(tmp_path / case, monkeypatch, group, {name: "x"}, code)
    with pytest.raises(PluginError, match=message) as raised:
        registry[name]
    assert "\n" not in str(raised.value) and f"'{name}'" in str(raised.value)
    assert f"plugin_{case.replace('-', '_')}:x" in str(raised.value)


def test_two_packages_of_one_name_are_named(tmp_path, monkeypatch):
    for folder in ("first", "second"):
        install(tmp_path / folder, monkeypatch, "some.group", {"odd": "x"}, "x = 2")
    with pytest.raises(
        PluginError, match=r"thing 'odd' of the installed plugin_\w+:x already exists"
    ):
        _ = "odd" in Registry("thing", ObjectiveError, "some.group")
