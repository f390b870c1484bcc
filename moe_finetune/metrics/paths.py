"""How tokens move from one MoE layer to the next, and how stable their paths are."""

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, integers, keep, to_numpy


def pair_counts(index_TK: np.ndarray, next_index_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """``(E, E)`` int64: number of tokens with expert e in one list and expert n in the other."""
    counts = np.zeros(num_experts * num_experts, np.int64)
    pairs = index_TK.shape[1] * next_index_TK.shape[1]
    for part in chunks(len(index_TK), pairs, limit=1_000_000):
        first = index_TK[part].astype(np.int64) * num_experts
        flat = first[:, :, None] + next_index_TK[part].astype(np.int64)[:, None, :]
        counts += np.bincount(flat.ravel(), minlength=counts.size)
    return counts.reshape(num_experts, num_experts)


def conditional_activation(
    index_TK: Array, next_index_TK: Array, num_experts: int, mask_T: Array | None = None
) -> np.ndarray:
    """``P(n in A^{l+1} given e in A^l)`` as ``(E, E)``, row e and column n.

    ``index_TK`` and ``next_index_TK`` ``(T, K)`` are the experts selected in two adjacent MoE
    layers. Rows sum to the next layer's K; the row of an unused expert is 0. Entries are ``K / E``
    if layers are independent and balanced, 0 or 1 if paths are fixed. Source: P1 Fig. 2.
    """
    index = integers("index_TK", index_TK, ("T", "K"), limit=num_experts)
    following = integers("next_index_TK", next_index_TK, (len(index), "K"), limit=num_experts)
    chosen = keep("mask_T", mask_T, len(index))
    index, following = index[chosen], following[chosen]
    counts_EE = pair_counts(index, following, num_experts).astype(np.float64)
    used_E = np.bincount(index.ravel(), minlength=num_experts)[:, None]
    return np.divide(counts_EE, used_E, out=np.zeros_like(counts_EE), where=used_E > 0)


def path_stability(top1_a_T: Array, top1_b_T: Array) -> float:
    """Share of tokens whose top-1 expert is the same in two checkpoints.

    ``(T,)`` for one layer, or ``(T, L)`` for the mean over layers too. Range 0 to 1 (nothing
    changed); about ``1/E`` for two unrelated balanced routers. Source: P1 Table 13.
    """
    a = to_numpy(top1_a_T)
    a = integers("top1_a_T", a, ("T", "L")[: max(1, min(a.ndim, 2))])
    b = integers("top1_b_T", top1_b_T, a.shape)
    return float((a == b).mean())


def top_choice(index_TLK: np.ndarray, weights_TLK: np.ndarray) -> np.ndarray:
    """The selected expert of highest weight, ``(T, L)``; among equal weights the lowest id.

    The order in which a router lists its experts is ignored.
    """
    best = weights_TLK.max(-1, keepdims=True)
    highest = np.iinfo(index_TLK.dtype).max
    return np.where(weights_TLK == best, index_TLK, highest).min(-1)
