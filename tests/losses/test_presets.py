import json
from pathlib import Path

import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import resolve_method
from tests.support import tiny
from tests.support.objectives import objective_of


@pytest.mark.parametrize("name", PRESETS)
def test_every_term_is_valid_and_every_preset_says_what_it_shows(name):
    preset = PRESETS[name]
    assert preset.name == name and preset.source and preset.shows
    assert set(preset.method()) <= {"terms", "perturbations", "bias_update", "router_gradient"}
    for term, options in preset.terms.items():
        table = {"table": "t.safetensors"} if term == "supervised_routing" else {}
        parsed = TERMS[term].Options(**options, **table)
        assert parsed.weight == options["weight"] > 0


# preset: balance (variant, scope, weight), other terms' weights
TABLE = {
    "none": (None, {}),
    "aux_loss": (("deepseek", "sequence", 1e-3), {}),
    "gshard": (("gshard", "micro_batch", 1e-3), {}),
    "st_moe": (("switch", "micro_batch", 1e-2), {"z_loss": 1e-3}),
    "loss_free": (None, {}),
    "densemixer": (None, {}),
    "orthogonal_variance": (
        ("deepseek", "sequence", 1e-3),
        {"orthogonality": 16.384, "variance": 16.384},
    ),
    "orthogonal_variance_mean": (
        ("deepseek", "sequence", 1e-3),
        {"orthogonality": 1e-3, "variance": 1e-3},
    ),
    "specialization_coupling": (
        ("deepseek", "micro_batch", 1e-3),
        {"specialization": 2e-4, "coupling": 1e-4},
    ),
    "specialization_coupling_z": (
        ("deepseek", "micro_batch", 1e-3),
        {"specialization": 2e-4, "coupling": 1e-4, "z_loss": 1e-3},
    ),
    "specialization_coupling_scratch": (
        ("deepseek", "micro_batch", 1e-2),
        {"specialization": 2e-3, "coupling": 1e-3},
    ),
    "specialization_coupling_scratch_z": (
        ("deepseek", "micro_batch", 1e-2),
        {"specialization": 2e-3, "coupling": 1e-3, "z_loss": 1e-3},
    ),
    "erc": (("deepseek", "micro_batch", 1e-2), {"erc": 1.0}),
    "router_orthogonality": (("deepseek", "micro_batch", 1e-2), {"router_orthogonality": 1e-2}),
    "dpp": (("switch", "micro_batch", 1e-2), {"dpp": 0.1}),
    "ncl": (("switch", "micro_batch", 1e-2), {"ncl": 0.1}),
    "cosine_orthogonality": (("switch", "micro_batch", 1e-2), {"orthogonality": 0.1}),
    "supervised_routing": (None, {"supervised_routing": 1.0}),
    "supervised_routing_baseline": (("gshard", "micro_batch", 1e-2), {}),
}


def test_presets_are_the_papers():
    found = {}
    for name, preset in PRESETS.items():
        others = {term: options["weight"] for term, options in preset.terms.items()}
        weight = others.pop("load_balance", None)
        balance = preset.terms.get("load_balance", {})
        found[name] = (
            None if weight is None else (balance["variant"], balance["scope"], weight),
            others,
        )
    assert found == TABLE


def test_what_is_not_a_weight():
    assert PRESETS["gshard"].perturbations == {"random_second_choice": True}
    assert PRESETS["st_moe"].perturbations == {"jitter": 0.01, "expert_dropout": 0.4}
    assert PRESETS["loss_free"].method() == {"terms": {}, "bias_update": 1e-3}
    for name in ("erc", "router_orthogonality"):
        assert PRESETS[name].terms["load_balance"]["layers_reduction"] == "mean"
    assert PRESETS["cosine_orthogonality"].terms["orthogonality"]["form"] == "cosine"
    baseline = PRESETS["supervised_routing_baseline"].terms["load_balance"]
    assert baseline["probabilities"] == "topk"


def test_a_method_may_be_changed_without_changing_the_preset():
    method = PRESETS["aux_loss"].method()
    method["terms"]["load_balance"]["weight"] = 5.0
    method["terms"]["variance"] = {"weight": 1.0}
    assert PRESETS["aux_loss"].method()["terms"] == {
        "load_balance": {"weight": 1e-3, "variant": "deepseek", "scope": "sequence"}
    }
    # Presets share their balance term; changing one's copy must not reach another.
    assert PRESETS["orthogonal_variance"].terms["load_balance"]["weight"] == 1e-3


def gradient(terms, rows):
    """Router gradients of the objective over a batch of ``rows`` equal sequences."""
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    ids = torch.arange(4, 21).repeat(rows, 1)
    with Recorder(model, objective_of(terms, model_facts(model))):
        (model(input_ids=ids).logits.sum() * 0.0).backward()
    return torch.cat([layer.mlp.gate.weight.grad.flatten() for layer in model.model.layers])


@pytest.mark.parametrize("name", ["orthogonality", "variance"])
def test_p0_sums_over_the_papers_tokens_whatever_the_batch(name):
    printed = {name: PRESETS["orthogonal_variance"].terms[name]}
    mean = {name: PRESETS["orthogonal_variance_mean"].terms[name]}
    per_token = gradient(mean, rows=1)
    assert per_token.abs().max() > 0
    torch.testing.assert_close(gradient(printed, rows=1), 16384 * per_token)
    torch.testing.assert_close(gradient(printed, rows=3), 16384 * per_token, rtol=1e-3, atol=1e-5)


def test_weights_are_those_that_acted_when_a_sum_over_tokens_was_a_key():
    """``preset_weights.json``: weight times tokens of every preset at commit f50b9f9b."""
    recorded = json.loads((Path(__file__).parent / "preset_weights.json").read_text())
    for name, terms in recorded.items():
        found = resolve_method(
            name,
            terms={"supervised_routing": {"table": "t"}} if "supervised_routing" in terms else {},
        ).terms
        for term, options in terms.items():
            assert {key: getattr(found[term], key) for key in options} == options, (name, term)
