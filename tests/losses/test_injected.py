"""All terms together in a training step: checkpointed layers and interleaved forwards."""

import copy

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny
from tests.support.objectives import objective_of

TERMS = {
    "load_balance": {"weight": 0.3, "variant": "gshard", "scope": "sequence"},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 0.5, "form": "cosine"},
    "variance": {"weight": 0.74},
    "specialization": {"weight": 0.5},
    "coupling": {"weight": 2.0},
    "erc": {"weight": 0.4, "activation": "swiglu", "layers_reduction": "mean"},
    "router_orthogonality": {"weight": 0.6},
    "dpp": {"weight": 0.2},
    "ncl": {"weight": 0.3},
    "supervised_routing": {"weight": 0.5},
}


def step(model, batches, terms, checkpointing=False):
    """Gradients and values of one backward over forwards of ``batches``."""
    model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    objective = objective_of(terms, model_facts(model))
    values = []
    torch.manual_seed(5)
    with Recorder(model, objective, observers=[lambda _, loss: values.append(loss.values)]):
        sum(model(**batch).loss for batch in batches).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads, values, objective.state_dict()


@pytest.fixture
def terms(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"token_frequencies": torch.randn(tiny.VOCABULARY, 12).softmax(-1)}, path)
    return {**TERMS, "supervised_routing": {"weight": 0.5, "table": str(path)}}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_checkpointed_layers_meet_the_same_draws_and_tables(family, terms):
    model = tiny.model(family).train()
    batches = [tiny.batch(seed=1), tiny.batch(rows=2, length=23, seed=2)]
    plain, values, state = step(model, batches, terms)
    again, values_again, state_again = step(model, batches, terms, checkpointing=True)
    assert len(values) == len(values_again) == 2 * len(model_facts(model).moe_layers)
    assert set(values[1]) == set(terms)
    torch.testing.assert_close(values_again, values)
    torch.testing.assert_close(state_again, state)
    without, _, _ = step(model, batches, {})
    for name, grad in plain.items():
        scale = grad.abs().max().clamp_min(1e-6)
        assert (again[name] - grad).abs().max() <= 2e-5 * scale, name
    routers = [name for name in plain if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        assert (without[name] - plain[name]).norm() > 0.05 * plain[name].norm()
