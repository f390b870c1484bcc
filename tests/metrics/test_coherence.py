import math

import numpy as np
import pytest
import torch

from moe_finetune.metrics import coherence_barrier, effective_rank, mutual_coherence

E, H = 5, 7


def cosine(x, y):
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def test_mutual_coherence():
    router = np.random.default_rng(0).normal(size=(E, H))
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
