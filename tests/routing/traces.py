"""Synthetic routing with topics, so that some placements are better than others."""

import numpy as np


def topical(
    tokens: int = 600,
    layers: int = 4,
    experts: int = 12,
    width: int = 3,
    topics: int = 3,
    sharpness: float = 2.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """``index_TLK`` and ``seq_T``: sequences of 17 tokens, each of one topic with its experts."""
    rng = np.random.default_rng(seed)
    taste = np.random.default_rng(123).normal(size=(topics, layers, experts)) * sharpness
    seq = np.arange(tokens) // 17
    topic = rng.integers(topics, size=seq[-1] + 1)[seq]
    scores = taste[topic] + rng.gumbel(size=(tokens, layers, experts))
    return np.argsort(-scores, axis=-1)[..., :width], seq
