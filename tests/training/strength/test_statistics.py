"""What is logged of the routers' weights while training."""

from types import SimpleNamespace

import pytest
import torch

from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.routing.measures_of_model import router_geometry
from moe_finetune.training.measures.routing_statistics import TrainingStatistics
from tests.support import tiny

NAMES = ("routing/router_cosine", "routing/noise_level")


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
        means = torch.stack([router_geometry(weight) for weight in routers]).mean(0)
        return dict(zip(NAMES, means.tolist(), strict=True))

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
    assert read(statistics) == pytest.approx(before, rel=1e-4)
    forward()
    after = expected()
    assert read(statistics) == pytest.approx(after, rel=1e-4)
    assert all(abs(after[name] - before[name]) > 1e-3 for name in NAMES)


def test_sums_give_what_the_tokens_that_count_give():
    layers, experts, top_k, tokens = (1, 2, 4), 7, 2, 41
    generator = torch.Generator().manual_seed(5)
    mask_T = torch.rand(tokens, generator=generator) > 0.2
    statistics = TrainingStatistics(layers, experts)
    violation, variance, entropy = [], [], []
    for layer in layers:
        p_TE = torch.randn(tokens, experts, generator=generator).softmax(-1)
        weights_TK, index_TK = p_TE.topk(top_k)
        scores_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        record = SimpleNamespace(
            layer=layer, mask_T=mask_T, index_TK=index_TK, scores_TK=scores_TK,
            distribution_TE=p_TE, router_weight_EH=None,
        )  # fmt: skip
        statistics(record, SimpleNamespace(values={}))
        load_E = torch.bincount(index_TK[mask_T].ravel(), minlength=experts).double()
        violation.append(float(load_E.max() / load_E.mean() - 1))
        scores_TE = torch.zeros(tokens, experts).scatter(1, index_TK, scores_TK)[mask_T].double()
        variance.append(float(scores_TE.var(0, unbiased=False).mean()))
        entropy.append(float(-(p_TE * p_TE.log()).sum(-1)[mask_T].mean()))
    values = statistics.read()
    assert values["routing/max_violation"] == pytest.approx(sum(violation) / 3)
    assert values["routing/max_violation_worst_layer"] == pytest.approx(max(violation))
    assert values["routing/score_variance"] == pytest.approx(sum(variance) / 3)
    assert values["routing/entropy"] == pytest.approx(sum(entropy) / 3)
    assert len({round(value, 4) for value in violation}) > 1
