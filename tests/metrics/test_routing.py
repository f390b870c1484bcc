import math

import numpy as np
import pytest
import torch

from moe_finetune.metrics import (
    max_violation,
    routing_entropy,
    routing_variance,
    score_variance,
)
from moe_finetune.metrics.arrays import NotFiniteError
from tests.metrics.drawn import E, T, distribution


def test_max_violation_by_hand():
    assert max_violation([6, 3, 0]) == pytest.approx(1.0)  # mean 3, largest 6
    assert max_violation([5, 5, 5, 5]) == 0.0
    assert max_violation(torch.tensor([0.0, 0.0, 0.7, 0.0, 0.0])) == pytest.approx(4.0)  # E - 1


def test_max_violation_refuses_no_load():
    with pytest.raises(ValueError, match="load_E: got values from 0 to 0"):
        max_violation(np.zeros(4))


def test_routing_variance_against_loop():
    probs = distribution()
    wanted = 0.0
    for expert in range(E):
        mean = sum(probs[token, expert] for token in range(T)) / T
        wanted += (mean - 1 / E) ** 2 / E
    assert routing_variance(probs) == pytest.approx(wanted, rel=1e-12)
    single = torch.from_numpy(probs).float()
    assert routing_variance(single) == pytest.approx(wanted, rel=1e-4)


def test_score_variance_against_loop():
    scores = distribution(3)
    wanted = 0.0
    for token in range(T):
        for expert in range(E):
            mean = sum(scores[other, expert] for other in range(T)) / T
            wanted += (scores[token, expert] - mean) ** 2 / E / T
    assert score_variance(scores) == pytest.approx(wanted, rel=1e-12)


def test_routing_entropy_by_hand_and_loop():
    assert routing_entropy([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]) == pytest.approx(math.log(2) / 2)
    assert routing_entropy(np.full((3, 8), 1 / 8)) == pytest.approx(math.log(8))
    probs = distribution(5)
    wanted = -sum(p * math.log(p) for p in probs.ravel() if p > 0) / T
    assert routing_entropy(probs) == pytest.approx(wanted, rel=1e-12)


def test_negative_probabilities_are_refused():
    with pytest.raises(ValueError, match="expected at least 0"):
        routing_entropy([[1.5, -0.5]])


@pytest.mark.parametrize("metric", [routing_entropy, routing_variance, score_variance])
def test_not_finite_and_empty(metric):
    probs = distribution()
    probs[4, 2] = math.nan
    with pytest.raises(NotFiniteError, match=r"1 of 287 values .* first at \(4, 2\)"):
        metric(probs)
    with pytest.raises(ValueError, match=r"empty shape \(0, 7\)"):
        metric(np.empty((0, 7)))
    with pytest.raises(ValueError, match=r"got shape \(7,\), expected \(T, E\)"):
        metric(np.ones(7))


@pytest.mark.parametrize("metric", [routing_entropy, routing_variance, score_variance])
def test_bfloat16_and_order_do_not_matter(metric):
    probs = distribution(7)
    half = torch.from_numpy(probs).to(torch.bfloat16)
    assert metric(half) == pytest.approx(metric(probs), rel=2e-2)
    rng = np.random.default_rng(1)
    moved = probs[rng.permutation(T)][:, rng.permutation(E)]
    assert metric(moved) == pytest.approx(metric(probs), rel=1e-12)


def test_chunks_join(monkeypatch):
    from moe_finetune.metrics import arrays, routing

    probs = distribution(8, tokens=1271)
    whole = routing_entropy(probs), score_variance(probs)
    small = lambda rows, width: arrays.chunks(rows, width, limit=90)  # noqa: E731
    monkeypatch.setattr(routing, "chunks", small)
    assert (routing_entropy(probs), score_variance(probs)) == pytest.approx(whole, rel=1e-12)
