"""``inspect --prove --recipe``: a recipe's method by hand, checkpointed, and by the trainer."""

import json

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.cli import main
from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import meta_model, sites
from moe_finetune.models.small_configs import shrunk_config
from moe_finetune.moe.checkpointing import RunsAgain
from moe_finetune.moe.choice import kept_choice
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree, merge_mappings
from moe_finetune.training.callback import callback
from moe_finetune.training.self_test.prove_recipe import prove
from moe_finetune.training.specialization import Specialization
from tests.support import tiny, tiny_families

WHOLE = {"lora": None, "router": {"train": "full"}}
NOISE = {"method": {"perturbations": {"jitter": 0.02, "random_second_choice": True}}}


def proof(name, preset="orthogonal_variance", sections=None):
    made = tiny if name in tiny.FAMILY_NAMES else tiny_families
    values = {"model": {"path": "base"}, "data": {"train": "rows.jsonl"}}
    values = merge_mappings({**values, "method": {"preset": preset}}, sections or {})
    return prove(made.config(name), FAMILIES[name], recipe_from_tree(Tree(values)))


def first_problem():
    return proof("olmoe").problems[0]


@pytest.mark.parametrize(
    ("name", "method", "sections"),
    [
        ("olmoe", "orthogonal_variance", {"model": {"experts_kernel": "grouped"}}),
        ("qwen3_moe", "specialization_coupling", {"trainer": {"max_steps": 3}}),
        ("deepseek_v3", "loss_free", WHOLE),
        ("gemma4_text", "dpp", {"router": {"train": "lora"}}),
        ("gpt_oss", "erc", {"method": {"token_mask": "labels"}}),
        ("qwen3_next", "orthogonal_variance", {"method": {"share": 0.2}, "stage": "pretrain"}),
    ],
)
def test_a_recipe_is_proved(name, method, sections):
    state = torch.get_rng_state()
    found = proof(name, method, sections)
    assert found.ok, found.text()
    assert torch.equal(torch.get_rng_state(), state)
    names = [check.name for check in found.checks]
    for comparison in ("gradients of the method", "steps of the trainer"):
        assert sum(name.startswith(comparison) for name in names) >= 2
    assert "gradients under checkpointing" in names and "merged = base + adapter" in names
    assert not found.notes and found.text().endswith(
        "the recipe trains on these versions as by hand"
    )


def test_what_is_not_covered_is_named():
    sections = {**NOISE, "stage": "dpo", "model": {"quantization": "nf4"}}
    found = proof("olmoe", "orthogonal_variance", sections)
    assert found.ok, found.text()
    assert "model.quantization nf4: float32 ran" in found.notes
    assert "note   not covered: method.perturbations, but for checkpointing" in found.text()
    assert "stage dpo: transformers' Trainer ran in its place" in found.text()


def test_hooks_outside_of_what_runs_again_are_seen(monkeypatch):
    """What transformers 5.23 changed, which the five comparisons do not see."""
    monkeypatch.setattr(RunsAgain, "begin", lambda *_: None)
    if Version(transformers.__version__) < Version("5.23"):
        assert proof("olmoe").ok  # there hooks run again
    else:
        assert first_problem().startswith("WRONG  gradients under checkpointing")


def test_a_layer_that_would_run_twice_is_seen(monkeypatch):
    monkeypatch.setattr(kept_choice, "in_backward", lambda: False)
    problem = first_problem()
    assert problem.startswith("WRONG  gradients under checkpointing")
    assert "runs more than once in a forward" in problem


def test_losses_that_arrive_otherwise_are_seen(monkeypatch):
    monkeypatch.setattr(Specialization, "_scale", lambda self: 1.01 / self.accumulation)
    assert first_problem().startswith("WRONG  gradients of the method")


def test_a_trainer_that_does_something_else_is_seen(monkeypatch):
    """Its window is another than ours takes it for."""
    monkeypatch.setattr(callback.AccumulationWindow, "scale", lambda self: 1.0)
    assert first_problem().startswith("WRONG  steps of the trainer")


def test_a_small_model_has_every_class_of_layers_with_experts():
    config = CONFIG_MAPPING["glm4_moe"](first_k_dense_replace=3)
    smaller = shrunk_config(config, FAMILIES["glm4_moe"])
    indices = [site.index for site in sites(meta_model(smaller))]
    assert indices == [1, 2, 3]


def test_a_config_without_a_small_model_is_said(monkeypatch, tiny_checkpoint, capsys):
    monkeypatch.setattr("moe_finetune.models.small_configs.SMALL", 0)
    monkeypatch.setattr("moe_finetune.models.small_configs._attempts", lambda *_: iter(()))
    assert main(["inspect", str(tiny_checkpoint("olmoe")), "--prove"]) == 0
    assert capsys.readouterr().out.startswith("not compared: this config.json cannot be reduced")


def test_the_command(tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint("olmoe")
    recipe = tmp_path / "recipe.yaml"
    rows = "data: {train: rows.jsonl}"
    recipe.write_text(f"model: {{path: {base}}}\nmethod: {{preset: dpp, share: 0.1}}\n{rows}\n")
    assert main(["inspect", str(base), "--prove", "--recipe", str(recipe), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and len(document["checks"]) >= 18 and document["notes"] == []
