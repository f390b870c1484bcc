"""Random distributions over experts and random choices of them."""

import numpy as np

T, E, K = 41, 7, 3


def distribution(seed: int = 0, tokens: int = T, experts: int = E) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(experts, 0.4), size=tokens)


def choices(seed: int = 0, tokens: int = T, experts: int = E, width: int = K) -> np.ndarray:
    order = np.argsort(np.random.default_rng(seed).random((tokens, experts)), axis=-1)
    return order[:, :width]
