"""``inspect --prove``: right facts pass, and each kind of wrong one is named."""

import json
import os
from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune import plugins
from moe_finetune.cli import main
from moe_finetune.models import FAMILIES
from moe_finetune.models.base import expert_groups
from moe_finetune.training.proof import prove
from tests import tiny, tiny_families, unheard

# Latent attention and none, stacks and matrices, biases, own gates, another order of the answer.
RIGHT = (
    "deepseek_v2",
    "qwen3_next",
    "ernie4_5_moe",
    "gpt_oss",
    "minimax_m3_vl_text",
    "granitemoeshared",
    "gemma4",
    "inkling_mm_model",
)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_declaration_is_proved(name):
    made = tiny if name in tiny.FAMILY_NAMES else tiny_families
    proof = prove(made.config(name), FAMILIES[name])
    assert proof.ok, proof.text()
    names = {check.name for check in proof.checks}
    assert {"rule of the weights", "logits", "merged = base + adapter"} <= names
    assert "groups" in names or FAMILIES[name].own_weights is not None
    differences = {c.name: c.difference for c in proof.checks if c.difference is not None}
    assert len(differences) >= 8 and all(d < 2e-4 for d in differences.values())


GLM = FAMILIES["glm4_moe"]


@pytest.mark.parametrize(
    ("fact", "declared", "says"),
    [
        ("score", "softmax", "the model's weights are sigmoid, of sum 1, scaled by 1.7"),
        ("renormalize", lambda c: False, "the model's weights are sigmoid, of sum 1"),
        ("scaling", lambda c: 1.0, "scaled by 1.7"),
        ("groups", lambda c: (1, 1), "selects from 1 of 2 groups"),
        ("block_path", "block_sparse_moe", "experts at 'mlp.experts'"),
        ("router_name", "router", "['gate']"),
        ("router_weight", "wg.weight", "at 'weight'"),
        ("router_returns", ("index", "weights", "logits"), "('logits', 'weights', 'index')"),
        ("experts_name", "routed", "experts at 'mlp.experts'"),
        ("shared_targets", (), "mlp.shared_experts.down_proj"),
        ("shared_targets", ("mlp.shared.up_proj",), "mlp.shared_experts.down_proj"),
        ("attention_targets", ("attention.q",), "self_attn.q_proj"),
        ("moe_layers", lambda c: [0, 1, 2, 3], "experts in layers [1, 2, 3]"),
        ("num_experts", lambda c: 12, "have 10"),
        ("expert_width", lambda c: 72, "have 40"),
        ("top_k", lambda c: 2, "selects 3"),
    ],
)
def test_a_wrong_fact_is_named(fact, declared, says):
    proof = prove(tiny_families.config("glm4_moe"), replace(GLM, **{fact: declared}))
    assert len(proof.problems) == 1 or fact in ("block_path", "experts_name")
    assert proof.problems[0].startswith(f"{fact} is declared"), proof.problems
    assert says in proof.problems[0]


def test_a_wrong_fact_of_a_composite_is_named():
    wrong = replace(FAMILIES["qwen3_vl_moe"], renormalize=lambda config: False)
    (problem,) = prove(tiny_families.config("qwen3_vl_moe"), wrong).problems
    assert problem.startswith(
        "renormalize is declared as False, but the model's weights are softmax"
    )


@pytest.mark.parametrize(
    ("part", "declared", "says"),
    [
        ("router_bias", None, "'gate.e_score_correction_bias', added for the selection"),
        ("router_bias", "gate.bias", "model.layers.{layer}.mlp.gate.e_score_correction_bias"),
        ("router", "router.weight", "model.layers.{layer}.mlp.gate.weight"),
        ("gate", "experts.{expert}.w1.weight", "experts.{expert}.gate_proj.weight"),
        ("down", "experts.{expert}.w2.weight", "experts.{expert}.down_proj.weight"),
        ("gate_up", "experts.gate_up_proj", "experts.{expert}.up_proj.weight"),
    ],
)
def test_a_wrong_name_on_disk_is_named(part, declared, says):
    wrong = replace(GLM, disk=replace(GLM.disk, **{part: declared}))
    (problem,) = prove(tiny_families.config("glm4_moe"), wrong).problems
    assert problem.startswith(f"disk.{part} is declared as {declared!r}") and says in problem


def test_shared_experts_beside_the_block_are_missed():
    wrong = replace(FAMILIES["granitemoeshared"], shared_targets=())
    (problem,) = prove(tiny_families.config("granitemoeshared"), wrong).problems
    assert "shared_mlp.input_linear" in problem


def test_a_bias_that_is_not_there_is_named():
    declared = replace(FAMILIES["qwen3_moe"].disk, router_bias="gate.e_score_correction_bias")
    wrong = replace(FAMILIES["qwen3_moe"], disk=declared)
    (problem,) = prove(tiny.config("qwen3_moe"), wrong).problems
    assert "the block has no value per expert" in problem


def test_a_large_checkpoint_is_proved_on_a_small_model():
    """Published sizes: 355 billion parameters, of which nothing is built."""
    config = CONFIG_MAPPING["glm4_moe"](n_group=8, topk_group=4, first_k_dense_replace=3)
    proof = prove(config, GLM)
    assert proof.ok, proof.text()
    assert proof.sizes["hidden"] < 1000 and proof.sizes["layers"] <= 6
    wrong = prove(config, replace(GLM, groups=lambda c: (1, 1)))
    assert "4 of 8 groups" in wrong.problems[0]
    assert expert_groups(config) == (8, 4)


def command(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_command(tiny_checkpoint, capsys):
    code, said = command(capsys, tiny_checkpoint("mixtral"), "--prove")
    assert code == 0 and "proved: the declared facts" in said.out
    assert said.out.count("\nok ") > 15
    code, said = command(capsys, tiny_checkpoint("mixtral"), "--prove", "--json")
    document = json.loads(said.out)
    assert code == 0 and document["ok"] and document["model_type"] == "mixtral"


def test_the_command_with_a_plugin(tmp_path, capsys, monkeypatch):
    unheard.save(tmp_path / "base")
    families, base = dict(FAMILIES._values), tmp_path / "base"
    monkeypatch.setattr(plugins, "_files", {})

    def write(text):
        FAMILIES._values.clear()
        FAMILIES._values.update(families)
        (tmp_path / "mine.py").write_text(text)
        return "--plugin", tmp_path / "mine.py"

    try:
        code, said = command(capsys, base, "--prove")
        assert code == 2 and "--prove" in said.err and "register_family(" in said.err
        text = said.err[said.err.index("from moe_finetune.models import") :]
        text = text.replace('score="softmax"', 'score="sigmoid"')
        code, said = command(capsys, base, "--prove", *write(text))
        assert code == 0, said
        wrong = text.replace("config.routed_scaling_factor", "1.0")
        code, said = command(capsys, base, "--prove", *write(wrong))
        assert code == 1 and "WRONG  scaling: scaling is declared as 1.0" in said.out
    finally:
        write("")
        os.environ.pop(plugins.VARIABLE, None)
