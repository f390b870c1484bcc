"""Bucketing: sequences go to the rank that stores most of the experts they use (P1 app. D).

A scheduler knows a sequence's routing in the first MoE layer first, so that layer decides.
"""

from dataclasses import dataclass

import numpy as np

from moe_finetune.metrics.arrays import Array, integers
from moe_finetune.metrics.placement import rank_counts


@dataclass(frozen=True)
class Buckets:
    """Home ranks of sequences, and the share of dispatches that stay there.

    Attributes:
        sequences: indices of the sequences, ascending.
        home_S: home rank of each sequence.
        tokens_R: tokens on each rank.
        share_before: share of all dispatches, over all layers, on the home rank when sequences go
            to ranks in turn.
        share_after: the same with ``home_S``.
        first_layer_before: ``share_before`` in the first MoE layer only.
        first_layer_after: ``share_after`` in the first MoE layer only.
    """

    sequences: np.ndarray
    home_S: np.ndarray
    tokens_R: np.ndarray
    share_before: float
    share_after: float
    first_layer_before: float
    first_layer_after: float


def bucket_sequences(
    index_TLK: Array, seq_T: Array, ranks_LE: Array, slack: float = 1.1
) -> Buckets:
    """Assign each sequence to the rank with most of its first-layer experts, within balance.

    Args:
        index_TLK: ``(T, L, K)`` selected experts.
        seq_T: sequence of each token.
        ranks_LE: ``(L, E)`` rank of each expert.
        slack: a rank gets at most ``slack`` times its even share of the tokens (at least 1). A
            sequence that fits nowhere goes to the emptiest rank.

    Sequences with the largest gap between best and second-best rank are assigned first.
    """
    if not slack >= 1:
        raise ValueError(f"slack: got {slack}, expected at least 1")
    ranks = integers("ranks_LE", ranks_LE, ("L", "E"))
    index = integers("index_TLK", index_TLK, ("T", len(ranks), "K"), limit=ranks.shape[1])
    seq = integers("seq_T", seq_T, (len(index),))
    num_ranks = int(ranks.max()) + 1
    sequences, number_T = np.unique(seq, return_inverse=True)
    first_SR = np.zeros((len(sequences), num_ranks), np.int64)
    all_SR = np.zeros_like(first_SR)
    for part, counts_TLR in rank_counts(index, ranks, num_ranks):
        np.add.at(first_SR, number_T[part], counts_TLR[:, 0])
        np.add.at(all_SR, number_T[part], counts_TLR.sum(1, dtype=np.int64))
    tokens_S = np.bincount(number_T)
    home_S = _assign(first_SR, tokens_S, slack * len(index) / num_ranks)
    turn_S = np.arange(len(sequences)) % num_ranks
    return Buckets(
        sequences,
        home_S,
        np.bincount(home_S, tokens_S, num_ranks).astype(np.int64),
        _home_share(all_SR, turn_S),
        _home_share(all_SR, home_S),
        _home_share(first_SR, turn_S),
        _home_share(first_SR, home_S),
    )


def _assign(first_SR: np.ndarray, tokens_S: np.ndarray, capacity: float) -> np.ndarray:
    ranked = np.sort(first_SR, axis=-1)
    regret = ranked[:, -1] - (ranked[:, -2] if ranked.shape[1] > 1 else 0)
    room_R = np.full(first_SR.shape[1], capacity)
    home_S = np.empty(len(first_SR), np.int64)
    for sequence in np.argsort(-regret, kind="stable"):
        fits = room_R >= tokens_S[sequence]
        wish = np.where(fits, first_SR[sequence], -1)
        home_S[sequence] = wish.argmax() if fits.any() else room_R.argmax()
        room_R[home_S[sequence]] -= tokens_S[sequence]
    return home_S


def _home_share(dispatches_SR: np.ndarray, home_S: np.ndarray) -> float:
    home_dispatches = np.take_along_axis(dispatches_SR, home_S[:, None], axis=1)
    return float(home_dispatches.sum() / dispatches_SR.sum())
