"""What is logged of the routers' weights while training."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_finetune.metrics import noise_level, router_cosine
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import model_facts
from moe_finetune.training.state import pack, unpack
from moe_finetune.training.statistics import TrainingStatistics
from tests import tiny

NAMES = {"routing/router_cosine": router_cosine, "routing/noise_level": noise_level}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_router_cosine_and_epsilon_are_those_of_the_weights_since_the_last_read(family):
    model = tiny.model(family).train()
    facts = model_facts(model)
    statistics = TrainingStatistics(facts.moe_layers, facts.num_experts)

    def forward():
        with Recorder(model, observers=[statistics]):
            model(input_ids=torch.randint(4, 260, (2, 7)))

    def expected():
        routers = [model.model.layers[layer].mlp.gate.weight for layer in facts.moe_layers]
        return {
            name: sum(of(weight) for weight in routers) / len(routers) for name, of in NAMES.items()
        }

    def read(held):
        return {name: value for name, value in held.read().items() if name in NAMES}

    forward()
    before = expected()
    with torch.no_grad():
        for layer in facts.moe_layers:
            model.model.layers[layer].mlp.gate.weight[0] += (
                2.5 * model.model.layers[layer].mlp.gate.weight[1]
            )
    forward()
    tensors: dict[str, torch.Tensor] = {}
    again = TrainingStatistics(facts.moe_layers, facts.num_experts)
    again.load_state_dict(
        unpack(copy.deepcopy(pack(statistics.state_dict(), tensors, "s")), tensors)
    )
    assert read(statistics) == pytest.approx(before, rel=1e-4)
    assert read(again) == pytest.approx(before, rel=1e-4)
    forward()
    after = expected()
    assert read(statistics) == pytest.approx(after, rel=1e-4)
    assert all(abs(after[name] - before[name]) > 1e-3 for name in NAMES)
