"""Placements that need no plan."""

import numpy as np


def baseline_placements(
    num_layers: int, num_experts: int, num_ranks: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """``ranks_LE`` of index order (vLLM's ``linear``), round robin and random."""
    size = num_experts // num_ranks
    index_order = np.arange(num_experts) // size
    rng = np.random.default_rng(seed)
    return {
        "index_order": np.tile(index_order, (num_layers, 1)),
        "round_robin": np.tile(np.arange(num_experts) % num_ranks, (num_layers, 1)),
        "random": np.stack([rng.permutation(index_order) for _ in range(num_layers)]),
    }
