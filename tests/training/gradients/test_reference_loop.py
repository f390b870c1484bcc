"""Gradients of all trainable parameters against plain loops: families, wrappers, and a control."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.support import reference_loop, tiny
from tests.support.ranks import furthest
from tests.support.tiny_adapter import random_factors

TERMS = {
    "load_balance": {"weight": 0.3},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
    "specialization": {"weight": 0.4},
    "coupling": {"weight": 0.8},
    "erc": {"weight": 0.6, "noise": False},
    "router_orthogonality": {"weight": 0.9},
    "dpp": {"weight": 0.2},
    "ncl": {"weight": 0.3},
}
SCALING = 7.0 / 3
LIMIT = 5e-5


def wrapped(family, wrapper):
    torch.manual_seed(1)
    base = tiny.model(family)
    if wrapper == "whole":
        return base.train()
    router = "full" if wrapper == "router in full" else "lora"
    model = add_lora(base, LoraSection(rank=3, alpha=7.0), router).train()
    random_factors(model, 0.1)
    return model


def ours(model, batches, terms, kernel="auto"):
    model.zero_grad()
    method = {"terms": terms, "strength": {"first": False}}
    with Specialization(model, method, kernel=kernel):
        sum(model(**batch).loss for batch in batches).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["adapter", "router in full", "whole"])
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_gradients_are_those_of_the_loop(family, wrapper):
    model = wrapped(family, wrapper)
    batches = [tiny.batch(rows=2, length=7, seed=4), tiny.batch(rows=1, length=6, seed=5)]
    wanted = reference_loop.gradients(model, batches, TERMS, SCALING)
    if wrapper == "adapter":  # two forwards before one backward
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    kernel = "grouped" if wrapper == "router in full" else "loop"
    assert furthest(ours(model, batches, TERMS, kernel), wanted, 1e-5) <= LIMIT


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
ADAPTERS = {
    "rslora": ({"use_rslora": True, "target_parameters": STACKS}, 7.0 / 3**0.5),
    "dora": ({"use_dora": True, "modules_to_save": ["mlp.gate"]}, SCALING),
    "experts in full": ({"modules_to_save": ["mlp.gate", "experts"]}, SCALING),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_other_adapters_have_the_gradients_of_the_loop(kind):
    options, scaling = ADAPTERS[kind]
    torch.manual_seed(1)
    adapter = LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options
    )
    model = get_peft_model(tiny.model("qwen3_moe"), adapter).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(0, 0.1)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    batches = [tiny.batch(rows=2, length=7, seed=4)]
    wanted = reference_loop.gradients(model, batches, TERMS, scaling)
    assert furthest(ours(model, batches, TERMS), wanted, 1e-5) <= LIMIT


def test_a_weight_that_is_a_hundredth_off_is_seen():
    """Negative control: the comparison fails for 0.71 in place of 0.70, term by term."""
    model, batches = wrapped("olmoe", "router in full"), [tiny.batch(rows=2, length=7, seed=4)]
    for name, options in TERMS.items():
        right = {name: {**options, "weight": 0.70}}
        wrong = copy.deepcopy(right)
        wrong[name]["weight"] = 0.71
        wanted = reference_loop.gradients(model, batches, right, SCALING)
        assert furthest(ours(model, batches, right), wanted, 1e-5) <= LIMIT, name
        assert furthest(ours(model, batches, wrong), wanted, 1e-5) > LIMIT, name


def test_layers_in_torchs_checkpoint_wrapper():
    """What accelerate's activation checkpointing puts around decoder layers."""
    model = wrapped("olmoe", "router in full")
    batches = [tiny.batch(rows=2, length=7, seed=4), tiny.batch(rows=1, length=6, seed=5)]
    wanted = reference_loop.gradients(model, batches, TERMS, SCALING)
    model.get_base_model().config.use_cache = False  # a second visit would fill it again
    layers = model.get_base_model().model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)
    got = ours(model, batches, TERMS)
    got = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.items()}
    assert furthest(got, wanted, 1e-5) <= LIMIT
