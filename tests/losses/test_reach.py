"""What each term's gradient reaches in a real model: its router, its experts, what lies below."""

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny

# term-form: options, trained inside the last MoE layer, and whether the gradient flows below it
REACH = {
    "load_balance": ({}, {"router"}, True),
    "load_balance-sequence": ({"scope": "sequence", "variant": "gshard"}, {"router"}, True),
    "z_loss": ({}, {"router"}, True),
    "variance": ({}, {"router"}, True),
    "supervised_routing": ({}, {"router"}, True),
    "orthogonality": ({}, {"gate_up", "down"}, True),
    "specialization": ({}, {"gate_up"}, True),
    "dpp": ({}, {"gate_up", "down"}, True),
    "ncl": ({}, {"gate_up", "down"}, True),
    "coupling": ({}, {"router"}, True),
    "erc": ({}, {"router", "gate_up"}, False),
    "erc-router_grad": ({"router_grad": False}, {"gate_up"}, False),
    "erc-output": ({"activation": "output"}, {"router", "gate_up", "down"}, False),
    "router_orthogonality": ({}, {"router"}, False),
}


def build(name, tmp_path, facts):
    options, trained, below = REACH[name]
    name = name.partition("-")[0]
    if name == "supervised_routing":
        table = torch.rand(facts.vocab_size, facts.num_experts).softmax(-1)
        save_file({"token_frequencies": table}, tmp_path / "table.safetensors")
        options = {**options, "table": str(tmp_path / "table.safetensors")}
    term = TERMS[name](TERMS[name].Options(weight=1.0, **options))
    term.check(facts)
    return term, trained, below


def loss_in_the_last_layer(model, term):
    """The term's value with its graph, from records of a real forward."""
    records = []
    with Recorder(model, observers=[lambda r, _: records.append(r)], needs=term.needs) as recorder:
        model(**tiny.batch())
        lower, last = records[-2:]
        previous = PreviousLayer(lower.layer, lower.distribution_TE, lower.index_TK)
        loss = term.loss(last, LayerContext(previous=previous))
    return loss, recorder.layers


@pytest.mark.parametrize("name", REACH)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_gradient_reaches_what_the_term_says(family, name, tmp_path):
    model = tiny.model(family).train()
    term, trained, below = build(name, tmp_path, model_facts(model))
    loss, layers = loss_in_the_last_layer(model, term)
    last, lower = layers[-1], layers[-2]
    parameters = {
        "router": last.router.weight,
        "gate_up": last.experts.gate_up_proj,
        "down": last.experts.down_proj,
        "lower_router": lower.router.weight,
        "below": model.get_input_embeddings().weight,
    }
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    moved = {
        key
        for key, grad in zip(parameters, found, strict=True)
        if grad is not None and grad.abs().max() > 0
    }
    assert moved - {"below", "lower_router"} == trained
    assert ("below" in moved) == below
    assert ("lower_router" in moved) == below
    assert term.trains == {"router" if part == "router" else "experts" for part in trained}
    if name == "erc-router_grad":  # of the fused stack the gate rows alone
        width = last.experts.gate_up_proj.shape[1] // 2
        grad = found[1]
        assert grad[:, :width].abs().max() > 0 and grad[:, width:].abs().max() == 0
