"""How evenly tokens are distributed over the experts."""

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, floats, integers


def expert_load(index_TK: Array, num_experts: int) -> np.ndarray:
    """Dispatches per expert, ``(E,)`` int64: how many (token, choice) pairs select each expert.

    Also accepts ``index_TLK`` and then returns ``(L, E)``. Sums to T*K per layer; T*K/E everywhere
    at perfect balance. Source: P0 eq. 36 (load_e).
    """
    shape = ("T", "K") if np.ndim(index_TK) == 2 else ("T", "L", "K")
    index = integers("index_TK", index_TK, shape, limit=num_experts)
    tokens, layers = index.shape[0], 1 if index.ndim == 2 else index.shape[1]
    index_TLK = index.reshape(tokens, layers, -1)
    load_LE = np.zeros((layers, num_experts), np.int64)
    for part in chunks(tokens, layers * index_TLK.shape[2]):
        for layer in range(layers):
            picked = index_TLK[part, layer].ravel()
            load_LE[layer] += np.bincount(picked, minlength=num_experts)
    return load_LE[0] if index.ndim == 2 else load_LE


def collapse_limit(num_experts: int, top_k: int) -> float:
    """MaxVio above which a router counts as collapsed: 3/4 of the largest value, E / K - 1."""
    return 0.75 * (num_experts / top_k - 1)


def max_violation(load_E: Array) -> float:
    """MaxVio: ``(max_e load_e - mean load) / mean load`` over the whole evaluation set.

    ``load_E`` ``(E,)`` counts or shares. Range 0 (perfect balance) to E - 1 (one expert takes all;
    at most E / K - 1 with K distinct experts per token). Source: P0 eq. 36 (after Wang et al.
    2024). Raises ValueError for negative or all-zero loads.
    """
    load = floats("load_E", load_E, ("E",))
    mean = load.mean()
    if load.min() < 0 or mean == 0:
        raise ValueError(
            f"load_E: got values from {load.min():g} to {load.max():g}, expected loads >= 0 "
            "of which at least one is positive"
        )
    return float((load.max() - mean) / mean)
