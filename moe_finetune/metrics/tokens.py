"""How far routing follows the token: router ranks compared with token counts."""

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, floats, integers


def conditional_mean_rank(
    logits_TN: Array, token_ids_T: Array, token_frequencies_VN: Array, k: int = 1
) -> tuple[float, float]:
    """CMR_k: mean rank by token frequency of the expert that the router ranks k-th.

    ``logits_TN`` ``(T, N)`` router logits (or probabilities) over N experts; ``token_ids_T``
    ``(T,)``; ``token_frequencies_VN`` ``(V, N)`` counts or shares of each token id per expert. The
    rank is 1 + the number of experts with a strictly greater frequency; tokens without counts are
    dropped; equal logits are ranked by expert index. Pool layers by stacking their rows along T. 1
    when the router follows the token counts perfectly (k = 1), about ``(N + 1) / 2`` when they are
    unrelated, N at worst. Returns the mean and the population standard deviation over tokens.
    Source: P3 section 4.1.
    """
    logits = floats("logits_TN", logits_TN, ("T", "N"), as_given=True)
    tokens, experts = logits.shape
    frequencies = floats("token_frequencies_VN", token_frequencies_VN, ("V", experts))
    ids = integers("token_ids_T", token_ids_T, (tokens,), limit=len(frequencies))
    if not 1 <= k <= experts:
        raise ValueError(f"k: got {k}, expected 1 to {experts}")
    counted = frequencies[ids].sum(-1) > 0
    if not counted.any():
        raise ValueError(
            "token_frequencies_VN: none of the tokens has counts, expected at least one"
        )
    logits, ids = logits[counted], ids[counted]
    ranks = np.empty(len(ids))
    for part in chunks(len(ids), experts):
        chosen = np.argsort(-logits[part], axis=-1, kind="stable")[:, k - 1]
        of_token = frequencies[ids[part]]
        chosen_share = np.take_along_axis(of_token, chosen[:, None], axis=-1)
        ranks[part] = 1 + (of_token > chosen_share).sum(-1)
    return float(ranks.mean()), float(ranks.std())
