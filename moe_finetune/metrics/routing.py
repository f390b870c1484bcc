"""Statistics of the router's probabilities and scores over a set of tokens."""

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, entropy, floats


def routing_variance(probs_TE: Array) -> float:
    """``1/E sum_e (mean_t g_e(x_t) - 1/E)^2`` of the mean routing distribution.

    ``probs_TE`` ``(T, E)``, rows sum to 1. 0 at perfect balance; rises with imbalance to
    ``(E - 1) / E^2`` when one expert takes everything. Source: P0 eq. 42.
    """
    probs = floats("probs_TE", probs_TE, ("T", "E"), as_given=True)
    mean_E = probs.mean(0, dtype=np.float64)
    return float(((mean_E - 1 / len(mean_E)) ** 2).mean())


def score_variance(scores_TE: Array) -> float:
    """Mean over tokens of ``1/E sum_e (s_te - mean_t s_te)^2``: what the variance loss raises.

    ``scores_TE`` ``(T, E)`` after top-k: rows sum to 1, zeros elsewhere. 0 if all tokens have equal
    scores; at most ``(1 - 1/E) / E``, reached by one-hot scores in perfect balance (perfect
    specialization). Source: P0 eq. 7.
    """
    scores = floats("scores_TE", scores_TE, ("T", "E"), as_given=True)
    mean_E = scores.mean(0, dtype=np.float64)
    total = 0.0
    for part in chunks(*scores.shape):
        total += float(((scores[part] - mean_E) ** 2).sum())
    return total / scores.size


def routing_entropy(probs_TE: Array) -> float:
    """Mean over tokens of ``-sum_e p_te ln p_te``, in nats.

    ``probs_TE`` ``(T, E)``, rows sum to 1: full probabilities or top-k scores. ``ln E`` (``ln K``
    for top-k scores) if all are equal, 0 if every token has one certain expert. Source: P1; P3's
    S_RL.
    """
    probs = _distribution("probs_TE", probs_TE)
    total = 0.0
    for part in chunks(*probs.shape):
        total += float(entropy(probs[part].astype(np.float64)).sum())
    return total / len(probs)


def routing_information(scores_TE: Array) -> dict[str, float]:
    """Entropies of the expert Z that a token X is routed to, in nats.

    ``scores_TE`` ``(T, E)``: top-k scores, rows sum to 1. Returns ``entropy`` H(Z) of the mean
    distribution (``ln E`` at perfect balance), ``conditional_entropy`` H(Z|X) (at most ``ln K``; 0
    for one-hot scores), ``mutual_information`` I(X;Z) = H(Z) - H(Z|X) (``ln E`` at perfect
    specialization in balance) and ``collision_entropy`` H_2 = -ln sum_e mean_e^2 (between 0 and
    H(Z)). Source: P4 thm 3.3, 4.1, 4.2.
    """
    scores = _distribution("scores_TE", scores_TE)
    mean_E = scores.mean(0, dtype=np.float64)
    total, conditional = float(entropy(mean_E)), routing_entropy(scores)
    return {
        "entropy": total,
        "conditional_entropy": conditional,
        "mutual_information": total - conditional,
        "collision_entropy": float(-np.log((mean_E**2).sum())),
    }


def _distribution(name: str, values: Array) -> np.ndarray:
    array = floats(name, values, ("T", "E"), as_given=True)
    if array.min() < 0:
        raise ValueError(f"{name}: got values down to {array.min():g}, expected probabilities >= 0")
    return array
