import math

import numpy as np
import pytest
import torch

from moe_finetune.metrics import (
    conditional_activation,
    conditional_mean_rank,
    domain_information,
    path_stability,
    placement_metrics,
    top_choice,
)
from tests.metrics.drawn import E, T, choices


def test_conditional_activation_against_loop():
    here, there = choices(0, width=2), choices(1, width=3)
    here[here == 5] = 6  # expert 5 is never used; a token may now hold 6 twice
    here = here[here[:, 0] != here[:, 1]]
    there = there[: len(here)]
    found = conditional_activation(here, torch.from_numpy(there), E)
    for e in range(E):
        tokens = [t for t in range(len(here)) if e in here[t]]
        for n in range(E):
            wanted = np.mean([n in there[t] for t in tokens]) if tokens else 0.0
            assert found[e, n] == pytest.approx(wanted)
    assert found.sum(-1) == pytest.approx([3.0 * (e != 5) for e in range(E)])


def test_conditional_activation_of_a_fixed_path():
    here = np.array([[0], [1], [2], [0]])
    found = conditional_activation(here, (here + 1) % 3, 3)
    assert found.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    masked = conditional_activation(here, (here + 1) % 3, 3, mask_T=[1, 0, 1, 1])
    assert masked.tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]


def test_path_stability():
    assert path_stability([1, 2, 3, 4], torch.tensor([1, 0, 3, 4])) == 0.75
    both = np.array([[1, 2, 3], [4, 5, 6]])
    assert path_stability(both, both + np.array([[0, 0, 1], [0, 1, 0]])) == pytest.approx(4 / 6)


def test_top_choice_ignores_the_order_of_the_list():
    index = np.array([[[4, 1, 6]], [[2, 6, 0]]])
    weights = np.array([[[0.2, 0.5, 0.1]], [[0.3, 0.3, 0.1]]])
    assert top_choice(index, weights).tolist() == [[1], [2]]
    assert top_choice(index[..., ::-1], weights[..., ::-1]).tolist() == [[1], [2]]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_conditional_mean_rank_against_loop(k):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(T, 5))
    frequencies = rng.integers(0, 4, size=(11, 5)) / 3
    frequencies[6] = 0
    ids = rng.integers(0, 11, size=T)
    ranks = []
    for t in range(T):
        counts = frequencies[ids[t]]
        if counts.sum() == 0:
            continue
        expert = sorted(range(5), key=lambda e: -logits[t, e])[k - 1]
        ranks.append(1 + sum(c > counts[expert] for c in counts))
    assert len(ranks) < T
    found = conditional_mean_rank(torch.from_numpy(logits), ids, frequencies, k)
    assert found == pytest.approx((np.mean(ranks), np.std(ranks)))


def test_conditional_mean_rank_refuses():
    with pytest.raises(ValueError, match="none of the tokens has counts"):
        conditional_mean_rank(np.ones((2, 3)), [0, 1], np.zeros((2, 3)))


def test_domain_information():
    apart = domain_information([[1, 1, 0, 0], [0, 0, 2, 0]])
    assert apart["shares_GE"].tolist() == [[0.5, 0.5, 0, 0], [0, 0, 1, 0]]
    assert apart["mutual_information"] == pytest.approx(math.log(2))
    alike = domain_information([[1, 1, 0], [2, 2, 0]])
    assert alike["mutual_information"] == pytest.approx(0.0, abs=1e-15)
    with pytest.raises(ValueError, match="domain 1 of 3 has no token"):
        domain_information([[1, 0], [0, 0], [0, 1]])


def test_domain_information_against_loop():
    counts = np.random.default_rng(5).integers(0, 9, size=(3, E))
    joint = counts / counts.sum()
    wanted = sum(
        joint[g, e] * math.log(joint[g, e] / joint[g].sum() / joint[:, e].sum())
        for g in range(3)
        for e in range(E)
        if joint[g, e]
    )
    found = domain_information(torch.from_numpy(counts))
    assert found["mutual_information"] == pytest.approx(wanted, rel=1e-9)


def slow_placement(index, ranks):
    tokens, layers, _ = index.shape
    cross, pairs, touched, imbalance = 0, 0, 0, 0.0
    for t in range(tokens):
        for layer in range(layers):
            touched += len({ranks[layer, e] for e in index[t, layer]})
            if layer + 1 < layers:
                for e in index[t, layer]:
                    for n in index[t, layer + 1]:
                        cross += ranks[layer, e] != ranks[layer + 1, n]
                        pairs += 1
    for layer in range(layers):
        load = [0] * (ranks.max() + 1)
        for e in index[:, layer].ravel():
            load[ranks[layer, e]] += 1
        imbalance += max(load) / np.mean(load) / layers
    return {
        "cross_rank_share": cross / pairs,
        "ranks_per_token": touched / (tokens * layers),
        "rank_imbalance": imbalance,
    }


def test_placement_metrics_against_loop(monkeypatch):
    from moe_finetune.metrics import arrays, placement

    rng = np.random.default_rng(6)
    index = np.stack([choices(s, experts=12, width=5) for s in range(4)], axis=1)
    ranks = np.stack([rng.permutation(12) % 3 for _ in range(4)])
    wanted = slow_placement(index, ranks)
    assert placement_metrics(index, ranks) == pytest.approx(wanted)
    assert placement_metrics(torch.from_numpy(index), torch.from_numpy(ranks)) == pytest.approx(
        wanted
    )
    monkeypatch.setattr(
        placement, "chunks", lambda rows, width, limit: arrays.chunks(rows, width, limit=70)
    )
    assert placement_metrics(index.astype(np.int16), ranks) == pytest.approx(wanted)


def test_placement_metrics_refuses():
    with pytest.raises(ValueError, match="ranks_LE: got values down to -1"):
        placement_metrics(np.zeros((1, 1, 2), int), np.array([[0, -1]]))
    one_layer = placement_metrics(np.zeros((2, 1, 1), int), np.array([[0, 1]]))
    assert math.isnan(one_layer["cross_rank_share"])
