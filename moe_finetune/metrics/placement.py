"""Communication and balance of a trace under a placement of experts on ranks."""

from collections.abc import Iterator

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, integers


def rank_counts(
    index_TLK: np.ndarray, ranks_LE: np.ndarray, num_ranks: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of tokens with ``counts_TLR``: how many of a token's K experts are on each rank.

    Slices limit the memory to a few dozen MB for any number of tokens.
    """
    tokens, layers, width = index_TLK.shape
    layer_of = np.arange(layers)[None, :]
    for part in chunks(tokens, layers * max(num_ranks, width), limit=2_000_000):
        index = index_TLK[part]
        token_of = np.arange(len(index))[:, None]
        counts = np.zeros((len(index), layers, num_ranks), np.int16)
        for choice in range(width):
            # One choice never meets a (token, layer) twice, so fancy += is safe.
            counts[token_of, layer_of, ranks_LE[layer_of, index[:, :, choice]]] += 1
        yield part, counts


def placement_metrics(index_TLK: Array, ranks_LE: Array) -> dict[str, float]:
    """Communication and balance of a placement on a trace.

    ``index_TLK`` ``(T, L, K)`` selected experts; ``ranks_LE`` ``(L, E)`` the rank of each
    expert. Returns

    - ``cross_rank_share``: mean over tokens, adjacent layers and all K x K pairs of ``[rank(e^l) !=
      rank(n^{l+1})]``; 0 if every token stays on its rank, about ``1 - 1/R`` for a random
      placement. NaN for a single layer, which has no pairs.
    - ``ranks_per_token``: mean over tokens and layers of the number of distinct ranks among a
      token's K experts; 1 to ``min(K, R)``.
    - ``rank_imbalance``: mean over layers of the largest divided by the mean dispatches per rank; 1
      at perfect balance, R if one rank gets all.

    Definitions are ours; the paper (P1 app. D) reports samples/s.
    """
    ranks = integers("ranks_LE", ranks_LE, ("L", "E"))
    layers, experts = ranks.shape
    index = integers("index_TLK", index_TLK, ("T", layers, "K"), limit=experts)
    num_ranks = int(ranks.max()) + 1
    if ranks.min() < 0:
        raise ValueError(f"ranks_LE: got values down to {int(ranks.min())}, expected ranks >= 0")
    tokens, _, width = index.shape
    same, touched = 0, 0
    load_LR = np.zeros((layers, num_ranks), np.int64)
    for _, counts in rank_counts(index, ranks, num_ranks):
        same += int((counts[:, :-1] * counts[:, 1:]).sum(dtype=np.int64))
        touched += int(np.count_nonzero(counts))
        load_LR += counts.sum(0, dtype=np.int64)
    pairs = tokens * (layers - 1) * width * width
    return {
        "cross_rank_share": 1 - same / pairs if pairs else float("nan"),
        "ranks_per_token": touched / (tokens * layers),
        "rank_imbalance": float((load_LR.max(-1) / load_LR.mean(-1)).mean()),
    }
