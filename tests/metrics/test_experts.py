import math

import numpy as np
import pytest
import torch

from moe_finetune.metrics import expert_overlap
from moe_finetune.metrics.arrays import NotFiniteError
from moe_finetune.metrics.experts import separation

N, H = 41, 5


def cloud(seed: int = 0, labels: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, H)), rng.integers(labels, size=N)


def slow_overlap(embeddings, labels, k):
    total = 0.0
    k = min(k, len(labels) - 1)
    for i in range(len(labels)):
        others = [j for j in range(len(labels)) if j != i]
        others.sort(key=lambda j: (math.dist(embeddings[i], embeddings[j]), j))
        total += sum(labels[j] != labels[i] for j in others[:k]) / k
    return total / len(labels)


@pytest.mark.parametrize("k", [1, 3, 10, 40, 99])
def test_overlap_against_loop(k):
    embeddings, labels = cloud()
    wanted = slow_overlap(embeddings.tolist(), labels.tolist(), k)
    assert 0 < wanted < 1
    assert expert_overlap(embeddings, labels, k) == pytest.approx(wanted, abs=1e-12)
    tensors = torch.from_numpy(embeddings), torch.from_numpy(labels)
    assert expert_overlap(*tensors, k=k) == pytest.approx(wanted, abs=1e-12)


def test_overlap_of_separate_and_equal_embeddings():
    far = np.repeat([[0.0, 0.0], [50.0, 0.0]], 6, axis=0)
    assert expert_overlap(far, np.repeat([0, 1], 6), k=5) == 0.0
    same = np.ones((4, 3))  # ties go to the lower index, never to the point itself
    assert expert_overlap(same, [0, 1, 1, 1], k=1) == pytest.approx((1 + 1 + 1 + 1) / 4)


def test_overlap_in_chunks(monkeypatch):
    from moe_finetune.metrics import arrays, experts

    embeddings, labels = cloud(2)
    whole = expert_overlap(embeddings, labels)
    monkeypatch.setattr(experts, "chunks", lambda n, m: arrays.chunks(n, m, limit=3 * m))
    assert expert_overlap(embeddings, labels) == whole


def test_overlap_refuses():
    embeddings, labels = cloud()
    broken = embeddings.copy()
    broken[7, 3] = math.nan
    with pytest.raises(NotFiniteError, match=r"embeddings_NH: 1 of 205 .* first at \(7, 3\)"):
        expert_overlap(broken, labels)
    with pytest.raises(ValueError, match="expected at least 2"):
        expert_overlap(embeddings[:1], labels[:1])
    with pytest.raises(ValueError, match="k: got 0"):
        expert_overlap(embeddings, labels, k=0)


def test_silhouette_against_loop():
    embeddings, labels = cloud(4, labels=3)
    total = 0.0
    for i in range(N):
        mean = {}
        for label in range(3):
            group = [j for j in range(N) if labels[j] == label and j != i]
            mean[label] = np.mean([math.dist(embeddings[i], embeddings[j]) for j in group])
        own = mean.pop(labels[i])
        other = min(mean.values())
        total += (other - own) / max(own, other)
    overlap, silhouette = separation(embeddings, labels)
    assert silhouette == pytest.approx(total / N, abs=1e-12)
    assert overlap == pytest.approx(expert_overlap(embeddings, labels), abs=1e-12)
    assert separation(embeddings, np.zeros(N, int)) == (0.0, None)
    assert separation(embeddings[:1], labels[:1]) == (None, None)
