"""The cost of placements on tokens that they were not planned on."""

from collections.abc import Mapping

import numpy as np

from moe_finetune.metrics.arrays import Array, integers
from moe_finetune.metrics.placement import placement_metrics, rank_counts
from moe_finetune.placement.baselines import baseline_placements


def simulate_placement(
    index_TLK: Array,
    ranks_LE: Array,
    home_T: Array,
    hidden_size: int,
    bytes_per_element: int = 2,
) -> dict[str, float]:
    """:func:`placement_metrics`, and the traffic of an expert-parallel engine for these tokens.

    Args:
        index_TLK: ``(T, L, K)`` selected experts.
        ranks_LE: ``(L, E)`` rank of each expert.
        home_T: home rank of each token's sequence.
        hidden_size: H of the vectors that are sent.
        bytes_per_element: 2 for bfloat16.

    Adds

    - ``home_share``: share of dispatches on the token's home rank;
    - ``all_to_all_bytes``: per token, over all MoE layers: ``2 H b sum_l n_l``, with n_l the
      distinct ranks other than home among the token's experts in layer l. A token's vector is sent
      to a rank once, however many of its experts are there, and returns combined once.
    """
    ranks = integers("ranks_LE", ranks_LE, ("L", "E"))
    index = integers("index_TLK", index_TLK, ("T", len(ranks), "K"), limit=ranks.shape[1])
    num_ranks = int(ranks.max()) + 1
    home = integers("home_T", home_T, (len(index),), limit=num_ranks)
    sent, at_home = 0, 0
    for part, counts_TLR in rank_counts(index, ranks, num_ranks):
        own_TL = np.take_along_axis(counts_TLR, home[part, None, None].astype(np.int64), 2)
        at_home += int(own_TL.sum(dtype=np.int64))
        sent += int(np.count_nonzero(counts_TLR)) - int(np.count_nonzero(own_TL))
    return {
        **placement_metrics(index, ranks),
        "home_share": at_home / index.size,
        "all_to_all_bytes": 2 * hidden_size * bytes_per_element * sent / len(index),
    }


def compare_placements(
    index_TLK: Array,
    seq_T: Array,
    planned_LE: Array,
    *,
    hidden_size: int,
    bytes_per_element: int = 2,
    seed: int = 0,
    others: Mapping[str, np.ndarray] | None = None,
) -> dict[str, dict[str, float]]:
    """Table of placements on held-out tokens: name -> :func:`simulate_placement`.

    Rows are index order, round robin, random, ``others`` and ``planned``; sequences, numbered by
    ``seq_T``, are assigned to ranks in turn. Use tokens on which ``planned_LE`` was not planned.
    """
    planned = integers("planned_LE", planned_LE, ("L", "E"))
    layers, experts = planned.shape
    num_ranks = int(planned.max()) + 1
    _, number_T = np.unique(integers("seq_T", seq_T, (len(index_TLK),)), return_inverse=True)
    placements = baseline_placements(layers, experts, num_ranks, seed)
    placements |= {**(others or {}), "planned": planned}
    return {
        name: simulate_placement(
            index_TLK, ranks, number_T % num_ranks, hidden_size, bytes_per_element
        )
        for name, ranks in placements.items()
    }
