"""P4 Figure 2: greedy and optimal choice of k experts as their features become similar.

A target is a weighted sum of k of N unit features. The greedy choice takes the k features with the
largest absolute inner product with the target (section 6.1, appendices F to H); the optimal choice
tries all subsets and takes the one whose span is nearest to the target. Theorem 5.3 states, for any
weights, that greedy is always right below coherence ``1 / (2k - 1)`` and fails for some target
above. Its proof (appendix F) covers the first choice and treats equal weights as the worst case.
They are not: a small weight fails sooner.

Of its simulation, the paper gives only k = 6. The rest is ours: 16 features of width 32, the
construction of their coherence, 40 targets per level, and weights that are equal or Gaussian.

Shape legend: B trials, N features, H their width, k chosen, S subsets.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.effects.pictures import new_figure, save
from moe_finetune.metrics.coherence import coherence_barrier
from moe_finetune.routing.sums import largest_cosine

CROWD = 3
"""Dimensions of the space toward which random features are pulled; few, so that they get close."""

COHERENCES = (0.02, 0.05, 1 / 11, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WORST_COHERENCES = (0.02, 0.05, 0.08, 0.0905, 0.0913, 0.1, 0.12, 0.15)


def random_features(
    trials: int, count: int, width: int, coherence: float, rng: np.random.Generator
) -> np.ndarray:
    """``(B, N, H)`` unit features whose mutual coherence is ``coherence`` in every trial.

    Orthonormal features are pulled toward random directions in a 3-dimensional space, by bisection,
    until the most similar pair has that cosine (of either sign).
    """
    if width < count:
        raise ValueError(f"width is {width}; it must be at least count={count}")
    if not 0 <= coherence < 0.95:
        raise ValueError(f"coherence is {coherence}; it must be in [0, 0.95)")
    start_BNH, space_BCH = (
        np.linalg.qr(rng.standard_normal((trials, width, size)))[0].transpose(0, 2, 1)
        for size in (count, CROWD)
    )
    towards_BNH = _unit(rng.standard_normal((trials, count, CROWD))) @ space_BCH
    low_B, high_B = np.zeros(trials), np.full(trials, 64.0)
    for _ in range(60):
        pull_B = (low_B + high_B) / 2
        features_BNH = _unit(start_BNH + pull_B[:, None, None] * towards_BNH)
        gram_BNN = features_BNH @ features_BNH.transpose(0, 2, 1)
        above_B = largest_cosine(torch.from_numpy(gram_BNN)).numpy() > coherence
        low_B, high_B = np.where(above_B, low_B, pull_B), np.where(above_B, pull_B, high_B)
    return features_BNH


def worst_features(count: int, k: int, coherence: float) -> np.ndarray:
    """``(N, N)`` unit features on which greedy fails just above the barrier; the answer is 0..k-1.

    The first k have cosine ``-coherence`` with each other, one more has ``+coherence`` with all of
    them, and the others are orthogonal. The sum of the first k scores ``1 - (k-1) mu`` with each of
    them and ``k mu`` with the outsider: equal at ``mu = 1 / (2k - 1)``.
    """
    if count <= k:
        raise ValueError(f"count is {count}; it must be more than k={k}")
    gram_NN = np.eye(count)
    gram_NN[:k, :k] -= coherence * (1 - np.eye(k))
    gram_NN[k, :k] = gram_NN[:k, k] = coherence
    try:
        return np.linalg.cholesky(gram_NN)
    except np.linalg.LinAlgError:
        raise ValueError(f"coherence is {coherence}; it must be less than 1/{k}") from None


def greedy_choice(features_BNH: np.ndarray, target_BH: np.ndarray, k: int) -> np.ndarray:
    """``(B, k)`` sorted ids of the features with the largest ``abs`` inner product (P4 §6.1)."""
    scores_BN = np.abs(np.einsum("bnh,bh->bn", features_BNH, target_BH))
    return np.sort(np.argsort(-scores_BN, axis=1, kind="stable")[:, :k], axis=1)


def optimal_choice(features_BNH: np.ndarray, target_BH: np.ndarray, k: int) -> np.ndarray:
    """``(B, k)`` sorted ids of the subset, among all, whose span is nearest to the target."""
    subsets_Sk = np.array(list(itertools.combinations(range(features_BNH.shape[1]), k)))
    return np.stack(
        [
            subsets_Sk[np.argmax(_explained(features_NH, target_H, subsets_Sk))]
            for features_NH, target_H in zip(features_BNH, target_BH, strict=True)
        ]
    )


def _explained(features_NH: np.ndarray, target_H: np.ndarray, subsets_Sk: np.ndarray) -> np.ndarray:
    """Squared length of the target's projection on the span of each subset, ``(S,)``."""
    gram_NN, scores_N = features_NH @ features_NH.T, features_NH @ target_H
    gram_Skk = gram_NN[subsets_Sk[:, :, None], subsets_Sk[:, None, :]]
    scores_Sk = scores_N[subsets_Sk]
    return (scores_Sk * np.linalg.solve(gram_Skk, scores_Sk[..., None])[..., 0]).sum(1)


def recovery(
    features_BNH: np.ndarray, answer_Bk: np.ndarray, weights_Bk: np.ndarray | None = None
) -> dict[str, float]:
    """Shares of trials in which the greedy and the optimal choice give ``answer_Bk`` (sorted).

    ``weights_Bk`` are the weights of the answer's features in the target, 1 by default.
    """
    k = answer_Bk.shape[1]
    parts_BkH = np.take_along_axis(features_BNH, answer_Bk[:, :, None], axis=1)
    if weights_Bk is not None:
        parts_BkH = weights_Bk[:, :, None] * parts_BkH
    target_BH = parts_BkH.sum(1)
    greedy_Bk = greedy_choice(features_BNH, target_BH, k)
    optimal_Bk = optimal_choice(features_BNH, target_BH, k)
    return {
        "greedy": float((greedy_Bk == answer_Bk).all(1).mean()),
        "optimal": float((optimal_Bk == answer_Bk).all(1).mean()),
    }


def run(settings: dict[str, Any], options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Figure 2 for one seed: recovery on random and on worst-case features of each coherence.

    Settings are ``count``, ``k``, ``width`` and ``trials``. Returns the claims' numbers and, for
    ``random`` (equal weights), ``gaussian`` (the same features and answers, weights from a
    Gaussian) and ``worst_case``, rows with ``coherence`` and the keys of :func:`recovery`.
    """
    count, k, width, trials = (settings[name] for name in ("count", "k", "width", "trials"))
    rng = np.random.default_rng(seed)
    weights_of = np.random.default_rng([seed, k])  # separate, so that features do not change
    rows: dict[str, list[dict[str, float]]] = {"random": [], "gaussian": [], "worst_case": []}
    for coherence in settings.get("coherences", COHERENCES):
        features_BNH = random_features(trials, count, width, coherence, rng)
        order_BN = rng.permuted(np.tile(np.arange(count), (trials, 1)), axis=1)
        answer_Bk = np.sort(order_BN[:, :k], axis=1)
        for kind, weights_Bk in (
            ("random", None),
            ("gaussian", weights_of.standard_normal(answer_Bk.shape)),
        ):
            shares = recovery(features_BNH, answer_Bk, weights_Bk)
            rows[kind].append({"coherence": coherence, **shares})
    for coherence in WORST_COHERENCES:
        features_BNH = worst_features(count, k, coherence)[None]
        shares = recovery(features_BNH, np.arange(k)[None])
        rows["worst_case"].append({"coherence": coherence, **shares})
    barrier = coherence_barrier(k)
    low, high = rows["random"][0], rows["random"][-1]
    at_barrier = min(rows["gaussian"], key=lambda row: abs(row["coherence"] - barrier))
    return {
        "greedy_lost": high["greedy"] - low["greedy"],
        "greedy_minus_optimal": high["greedy"] - high["optimal"],
        "half_recovery": half_recovery(rows["random"]),
        "gaussian_greedy_at_barrier": at_barrier["greedy"],
        "barrier": barrier,
        **rows,
    }


def half_recovery(rows: Sequence[dict[str, float]]) -> float:
    """Coherence at which greedy recovery falls to one half, interpolated between levels."""
    for low, high in itertools.pairwise(rows):
        if low["greedy"] >= 0.5 > high["greedy"]:
            share = (low["greedy"] - 0.5) / (low["greedy"] - high["greedy"])
            return low["coherence"] + share * (high["coherence"] - low["coherence"])
    return rows[-1]["coherence"]


def draw(runs: Mapping[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write ``figure2.png``: recovery against coherence, greedy and optimal, with the barrier."""
    (sweeps,) = runs.values()
    figure, (axes,) = new_figure((6, 3.6))
    for rows, choice, style, label in (
        ("random", "optimal", "s--", "optimal, random features"),
        ("random", "greedy", "o-", "greedy, random features"),
        ("gaussian", "greedy", "^-.", "greedy, Gaussian weights"),
        ("worst_case", "greedy", "x:", "greedy, worst features"),
    ):
        mean = np.mean([[row[choice] for row in sweep[rows]] for sweep in sweeps], axis=0)
        coherences = [row["coherence"] for row in sweeps[0][rows]]
        axes.plot(coherences, mean, style, label=label, markersize=4)
    axes.axvline(sweeps[0]["barrier"], color="gray", linewidth=1, label="barrier 1/(2k-1)")
    axes.set(xlabel="mutual coherence", ylabel="share of subsets recovered", ylim=(-0.05, 1.05))
    axes.legend(fontsize=8)
    save(figure, folder / "figure2.png")


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
