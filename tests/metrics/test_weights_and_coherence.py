import math

import numpy as np
import pytest
import torch

from moe_finetune.metrics import (
    coherence_barrier,
    effective_rank,
    erc_table,
    mutual_coherence,
    noise_level,
    router_cosine,
)

E, H, D = 5, 7, 3


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return rng.normal(size=(E, H)), rng.normal(size=(E, D, H))


def cosine(x, y):
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def test_router_cosine(weights):
    router, _ = weights
    pairs = [abs(cosine(router[i], router[j])) for i in range(E) for j in range(E) if i != j]
    assert router_cosine(router) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert router_cosine(np.eye(4, 6)) == 0.0
    assert router_cosine(np.outer([1.0, -2.0, 3.0], [1.0, 1.0])) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"expected \(E >= 2, H\)"):
        router_cosine(np.ones((1, 4)))


def test_noise_level(weights):
    router, _ = weights
    levels = [
        min(np.linalg.norm(router[i] - router[j]) for j in range(E) if j != i)
        / (2 * np.linalg.norm(router[i]))
        for i in range(E)
    ]
    assert noise_level(torch.from_numpy(router)) == pytest.approx(np.mean(levels), rel=1e-12)
    assert noise_level(3 * np.eye(4)) == pytest.approx(math.sqrt(2) / 2)
    assert noise_level([[1.0, 2.0], [1.0, 2.0]]) == 0.0
    with pytest.raises(ValueError, match="row 1 is zero"):
        noise_level([[1.0, 2.0], [0.0, 0.0]])


def test_erc_table_against_loop(weights):
    router, gate = weights
    norms = np.zeros((E, E))
    for i in range(E):
        for j in range(E):
            norms[i, j] = np.linalg.norm(gate[j] @ router[i])
    found = erc_table(router, gate, alphas=(0.5, 1, 2, 3))
    for alpha, loss in found["loss"].items():
        wanted = 0.0
        for i in range(E):
            for j in range(E):
                if i != j:
                    own = alpha * norms[i, i]
                    wanted += max(norms[i, j] - own, 0) + max(norms[j, i] - own, 0)
        assert loss == pytest.approx(wanted / E**2, rel=1e-12)
    least = found["least_alpha"]
    assert erc_table(router, gate, [least])["loss"][least] == pytest.approx(0.0, abs=1e-12)
    below = 0.99 * least
    assert erc_table(router, gate, [below])["loss"][below] > 0


def test_erc_of_perfect_and_absent_coupling():
    gate = np.einsum("ed,eh->edh", np.ones((4, 2)), np.eye(4))  # expert e reads dimension e
    assert erc_table(np.eye(4), gate) == {
        "loss": dict.fromkeys((1.0, 2.0, 3.0, 4.0, 5.0), 0.0),
        "least_alpha": 0.0,
    }
    assert erc_table(np.eye(4)[::-1].copy(), gate)["least_alpha"] == math.inf


def test_mutual_coherence(weights):
    router, _ = weights
    pairs = [abs(cosine(router[i], router[j])) for i in range(E) for j in range(i)]
    assert mutual_coherence(router) == pytest.approx(max(pairs), rel=1e-12)
    assert mutual_coherence(torch.from_numpy(-router)) == pytest.approx(max(pairs))
    assert mutual_coherence(np.eye(3)) == 0.0
    assert mutual_coherence([[1.0, 1.0], [0.0, 0.0], [-2.0, -2.0]]) == pytest.approx(1.0)
    assert mutual_coherence(np.ones((1, 4))) == 0.0


def test_coherence_barrier():
    assert [coherence_barrier(k) for k in (1, 2, 6)] == pytest.approx([1, 1 / 3, 1 / 11])
    with pytest.raises(ValueError, match="k: got 0"):
        coherence_barrier(0)


def test_effective_rank():
    assert effective_rank(2.5 * np.eye(4, 9)) == pytest.approx(4.0)
    assert effective_rank(np.outer([1.0, 2.0, 5.0], [1.0, -1.0])) == pytest.approx(1.0)
    assert effective_rank(np.zeros((3, 2))) == 0.0
    shares = np.array([3.0, 1.0]) / 4
    wanted = math.exp(-(shares * np.log(shares)).sum())
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(wanted, rel=1e-6)
