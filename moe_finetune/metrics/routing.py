"""Balance, spread and certainty of routing. ``of_*`` take sums' means over the last axis, any axes
before it, and are the definitions that the log, the page, ``analyze`` and ``compare`` read."""

import numpy as np

from moe_finetune.metrics.arrays import Array, chunks, entropy, floats


def max_violation(load_E: Array) -> float:
    """MaxVio: ``(max_e load_e - mean load) / mean load`` over the whole evaluation set.

    ``load_E`` ``(E,)`` counts or shares. Range 0 (perfect balance) to E - 1 (one expert takes all;
    at most E / K - 1 with K distinct experts per token). Source: P0 eq. 36 (after Wang et al.
    2024). Raises ValueError for negative or all-zero loads.
    """
    load = floats("load_E", load_E, ("E",))
    if load.min() < 0 or load.max() == 0:
        raise ValueError(
            f"load_E: got values from {load.min():g} to {load.max():g}, expected loads >= 0 "
            "of which at least one is positive"
        )
    return float(of_load(load))


def routing_variance(probs_TE: Array) -> float:
    """``1/E sum_e (mean_t g_e(x_t) - 1/E)^2`` of the mean routing distribution.

    ``probs_TE`` ``(T, E)``, rows sum to 1. 0 at perfect balance; rises with imbalance to
    ``(E - 1) / E^2`` when one expert takes everything. Source: P0 eq. 42.
    """
    probs = floats("probs_TE", probs_TE, ("T", "E"), as_given=True)
    return float(of_mean_probability(probs.mean(0, dtype=np.float64)))


def score_variance(scores_TE: Array) -> float:
    """Mean over tokens of ``1/E sum_e (s_te - mean_t s_te)^2``: minus the variance loss.

    ``scores_TE`` ``(T, E)`` after top-k: rows sum to 1, zeros elsewhere. 0 if all tokens have equal
    scores; at most ``(1 - 1/E) / E``, reached by one-hot scores in perfect balance (perfect
    specialization). Source: P0 eq. 7.
    """
    import torch

    from moe_finetune.losses.variance import variance_loss

    scores = floats("scores_TE", scores_TE, ("T", "E"))
    return abs(float(variance_loss(torch.from_numpy(scores))))


def routing_entropy(probs_TE: Array) -> float:
    """Mean over tokens of ``-sum_e p_te ln p_te``, in nats.

    ``probs_TE`` ``(T, E)``, rows sum to 1: full probabilities or top-k scores. ``ln E`` (``ln K``
    for top-k scores) if all are equal, 0 if every token has one certain expert. Source: P1; P3's
    S_RL.
    """
    probs = floats("probs_TE", probs_TE, ("T", "E"), as_given=True)
    if probs.min() < 0:
        raise ValueError(f"probs_TE: got values down to {probs.min():g}, expected at least 0")
    parts = (entropy(probs[part].astype(np.float64)) for part in chunks(*probs.shape))
    return float(sum(part.sum() for part in parts) / len(probs))


def of_load(load: np.ndarray) -> np.ndarray:
    """MaxVio of loads over the last axis; -1 where there is none."""
    mean = load.mean(-1)
    return (load.max(-1) - mean) / np.maximum(mean, 1e-12)


def of_mean_probability(mean: np.ndarray) -> np.ndarray:
    """Routing variance from mean probabilities."""
    return ((mean - 1 / mean.shape[-1]) ** 2).mean(-1)


def of_scores(
    mean: np.ndarray, square: np.ndarray, score_entropy: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Metrics from the mean top-k scores, mean squared scores and their mean entropy H(Z|X).

    ``score_variance`` (P0 eq. 7); with the entropy also ``score_entropy``, ``expert_entropy`` H(Z)
    (``ln E`` at perfect balance), ``mutual_information`` I(X;Z) = H(Z) - H(Z|X) (``ln E`` at
    perfect specialization in balance) and ``collision_entropy`` -ln sum_e mean_e^2, between 0 and
    H(Z): P4 thm 3.3, 4.1, 4.2.
    """
    squares = (mean**2).sum(-1)
    # mean_t (s - mean s)^2 = mean_t s^2 - (mean s)^2, summed over experts.
    metrics = {"score_variance": (square - squares) / mean.shape[-1]}
    if score_entropy is not None:
        marginal = entropy(mean)
        metrics["score_entropy"] = score_entropy
        metrics["expert_entropy"] = marginal
        metrics["mutual_information"] = marginal - score_entropy
        metrics["collision_entropy"] = -np.log(np.maximum(squares, 1e-300))
    return metrics


def collapse_limit(num_experts: int, top_k: int) -> float:
    """MaxVio above which a router counts as collapsed: 3/4 of the largest value, E / K - 1."""
    return 0.75 * (num_experts / top_k - 1)
