"""Is one arm better than the baseline? Paired over items and seeds.

Shape legend: S seeds, N items, P patterns (items whose S values are alike), B resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moe_finetune.evaluation.comparison import ALPHA, RESAMPLES, mcnemar, paired_bootstrap


@dataclass
class PairedTest:
    """What a test of one arm against the baseline found.

    Attributes:
        name: ``McNemar`` or ``bootstrap`` (one seed, over items), ``seeds and items``, ``paired t``
            (over seeds, for values that no item has by itself), or ``none``.
        difference: arm - baseline.
        low, high: 95 % interval of the difference, where the test gives one.
        p: two-sided; ``p_holm`` corrected over the study's tests of this kind.
        verdict: ``better``, ``worse`` or ``unclear``, at 5 % after the correction.
    """

    name: str
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: str = "unclear"


def compare_items(values_SN: np.ndarray, baseline_SN: np.ndarray, seed: int = 0) -> PairedTest:
    """Test item values of seed-paired runs; one seed gives that of one run.

    Several seeds are a sample as the items are: both are resampled (:func:`crossed_bootstrap`).

    Raises:
        ValueError: arrays of different shape, or without a seed or item.
    """
    if values_SN.shape != baseline_SN.shape or values_SN.ndim != 2 or not values_SN.size:
        raise ValueError(
            f"values_SN {values_SN.shape} and baseline_SN {baseline_SN.shape}: wanted one shape "
            "(seeds, items), not empty"
        )
    difference_SN = values_SN - baseline_SN
    rng = np.random.default_rng(seed)
    mean = float(difference_SN.mean())
    if len(difference_SN) > 1:
        return PairedTest("seeds and items", mean, *crossed_bootstrap(difference_SN, rng))
    low, high, p = paired_bootstrap(difference_SN[0], rng)
    if np.isin(np.concatenate([values_SN, baseline_SN]), (0.0, 1.0)).all():
        gained, lost = int((difference_SN > 0).sum()), int((difference_SN < 0).sum())
        return PairedTest("McNemar", mean, low, high, mcnemar(gained, lost))
    return PairedTest("bootstrap", mean, low, high, p)


def crossed_bootstrap(
    difference_SN: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Return low and high of the 95 % interval of the mean, and a two-sided p value.

    Seeds and items are resampled independently (the pigeonhole bootstrap, Owen 2007, "The
    pigeonhole bootstrap", Annals of Applied Statistics 1:386), so neither many items nor many seeds
    alone make a difference certain. A resample of S seeds has only (S-1)/S of their variance, which
    matters for few seeds, so deviations are widened by sqrt(S / (S-1)). The p value is the share of
    resampled means, shifted to mean zero, as far from zero as the observed one.
    """
    seeds, items = difference_SN.shape
    # Drawing N of the items is drawing how often each distinct pattern comes, and few are distinct.
    patterns_PS, counts_P = np.unique(difference_SN.T, axis=0, return_counts=True)
    step = max(1, 4_000_000 // len(counts_P))
    means = []
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        shares_BP = rng.multinomial(items, counts_P / items, size) / items
        weights_BS = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size) / seeds
        means.append(((shares_BP @ patterns_PS) * weights_BS).sum(1))
    observed = float(difference_SN.mean())
    deviations = (np.concatenate(means) - observed) * math.sqrt(seeds / (seeds - 1))
    low, high = np.quantile(deviations, [ALPHA / 2, 1 - ALPHA / 2])
    far = np.abs(deviations) >= abs(observed) - 1e-12
    return observed + float(low), observed + float(high), float((1 + far.sum()) / (1 + resamples))


def compare_seeds(values_S: np.ndarray, baseline_S: np.ndarray) -> PairedTest:
    """Test values of whole runs, paired by seed, with Student's t; "none" with one seed."""
    difference_S = np.asarray(values_S, float) - np.asarray(baseline_S, float)
    mean = float(difference_S.mean())
    if len(difference_S) < 2:
        return PairedTest("none", mean)
    spread = float(difference_S.std(ddof=1)) / math.sqrt(len(difference_S))
    if spread == 0:
        return PairedTest("paired t", mean, mean, mean, 1.0 if mean == 0 else 0.0)
    from scipy.stats import t

    freedom = len(difference_S) - 1
    half = float(t.ppf(1 - ALPHA / 2, freedom)) * spread
    p = float(2 * t.sf(abs(mean) / spread, freedom))
    return PairedTest("paired t", mean, mean - half, mean + half, p)
