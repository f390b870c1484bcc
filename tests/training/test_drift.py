"""Routing of the policy against the reference's: by a slow loop on two separate models."""

import math

import pytest
import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.drift import TOKENS, RoutingDrift, routing_drift
from tests import tiny

ROWS = [
    torch.randint(4, 260, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 9)
]
KEYS = ("routing/kl_from_reference", "routing/changed_from_reference")


def routed(model, row):
    """Distributions and selections of one row, by layer, from a recorder of their own."""
    records = []
    with (
        torch.no_grad(),
        Recorder(model.eval(), observers=[lambda record, _: records.append(record)], observe="all"),
    ):
        model(input_ids=torch.tensor([row]))
    return [(r.distribution_TE.tolist(), r.index_TK.tolist()) for r in records]


def by_hand(policy, reference):
    divergences, changed = [], []
    for row in ROWS:
        for (p, chosen), (q, other) in zip(
            routed(policy, row), routed(reference, row), strict=True
        ):
            for t in range(len(row)):
                divergences.append(
                    sum(a * math.log(a / b) for a, b in zip(p[t], q[t], strict=True) if a > 0)
                )
                changed.append(set(chosen[t]) != set(other[t]))
    return sum(divergences) / len(divergences), sum(changed) / len(changed)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("router", ["full", "lora"])
def test_drift_is_that_of_adapter_on_and_off(family, router):
    reference = tiny.model(family)
    policy = add_lora(tiny.model(family), LoraSection(rank=3, alpha=6.0), router).train()
    seen = []
    with Recorder(policy, observers=[lambda record, _: seen.append(record)]) as recorder:
        assert routing_drift(recorder, ROWS) == dict.fromkeys(KEYS, 0.0)  # a new adapter is nothing
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.04 * torch.randn_like(parameter))
        trains = [parameter.requires_grad for parameter in policy.parameters()]
        found = routing_drift(recorder, ROWS)
        assert policy.training and not seen
        assert trains == [parameter.requires_grad for parameter in policy.parameters()]
    divergence, changed = by_hand(policy, reference)
    assert divergence > 0.01 and 0.05 < changed < 1.0
    assert found[KEYS[0]] == pytest.approx(divergence, rel=1e-4)
    assert found[KEYS[1]] == pytest.approx(changed, abs=1e-12)


def test_the_sample_is_the_first_tokens_of_the_rows():
    rows = [{"input_ids": list(range(start, start + 700))} for start in (0, 1000, 2000)]
    kept = RoutingDrift(None, rows).rows
    assert [len(row) for row in kept] == [700, TOKENS - 700] and kept[1][0] == 1000
