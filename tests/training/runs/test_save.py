"""A whole model that training leaves: with the bias that was learned, or refused beforehand."""

import json

import pytest
import torch
from safetensors.torch import load_file

from moe_finetune.errors import RecipeError, UnsupportedModelError
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.layers import model_facts
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.save_and_resume.save_trained import save_trained
from tests.support import tiny

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def recipe(path, family="deepseek_v3", **sections):
    tree = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "method": {"terms": {}, "bias_update": 1e-3},
        "lora": None,
        "data": {"train": "a.jsonl"},
        **sections,
    }
    return recipe_from_tree(Tree(tree))


def learned(model):
    facts = model_facts(model)
    balancer = BiasBalancer(facts.moe_layers, facts.num_experts, 1e-3)
    balancer.bias = {at: torch.linspace(-0.2, 0.2, 12).roll(at) for at in facts.moe_layers}
    return balancer


@pytest.mark.parametrize("export", ["write", "drop", "no method"])
def test_moonlight_without_an_adapter(tmp_path, tiny_checkpoint, export):
    model = tiny.model("deepseek_v3")
    method = {"terms": {}, "bias_update": 1e-3, "export_bias": "write"}
    method = {"terms": {}} if export == "no method" else {**method, "export_bias": export}
    balancer = None if export == "no method" else learned(model)
    asked = recipe(tiny_checkpoint("deepseek_v3"), method=method)
    save_trained(model, tiny.tokenizer(), asked, tmp_path, balancer)
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    for layer in (1, 2):
        own = model.model.layers[layer].mlp.gate.e_score_correction_bias
        wanted = own + balancer.bias[layer] if export == "write" else own
        assert torch.equal(saved[BIAS.format(layer)], wanted)  # float32, in a bfloat16 model
    assert saved["model.norm.weight"].dtype == torch.bfloat16


def test_deepseek_v2_without_an_adapter(tmp_path, tiny_checkpoint):
    model = tiny.model("deepseek_v2")
    balancer = learned(model)
    save_trained(
        model, tiny.tokenizer(), recipe(tiny_checkpoint("deepseek_v2")), tmp_path, balancer
    )
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert torch.equal(saved[BIAS.format(2)], balancer.bias[2])
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "softmax")
    assert config["dtype"] == "bfloat16"
    with pytest.raises(UnsupportedModelError, match="topk_method 'noaux_tc' is not supported"):
        prepare(recipe(tmp_path / "merged"))


def test_a_family_without_a_place_is_refused_before_the_run(tiny_checkpoint):
    path = tiny_checkpoint("olmoe")
    for sections in (
        {"export": {"merge": False}},
        {"lora": {"rank": 4, "alpha": 8.0, "targets": []}, "export": {"merge": False}},
        {"lora": {"rank": 4, "alpha": 8.0}},
    ):
        with pytest.raises(RecipeError, match=r"method.bias_update: OLMoE.*export_bias: drop"):
            prepare(recipe(path, **sections))
