"""Confidence intervals and tests of differences, over items, seeds or both, and of two raters.

Intervals are two-sided 95 % intervals, and p values are two-sided. Shape legend: S seeds, N items,
P patterns (groups of items with equal S values), B resamples.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ALPHA = 0.05
RESAMPLES = 10_000
Z = float(stats.norm.ppf(1 - ALPHA / 2))
_LARGEST_Z = 38.0  # its p value is the smallest that a float holds
# Maximum number of values that a bootstrap keeps in memory.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its t-interval; infinite ends for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int


def t_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Mean of independent values and its Student t-interval."""
    array = np.asarray(values, dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"values: got {array.tolist()}, expected at least one, all finite")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = float(stats.t.ppf(1 - ALPHA / 2, array.size - 1) * stats.sem(array))
    return Interval(mean, mean - half, mean + half, array.size)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for the deviation of a single value."""
    array = np.asarray(values, dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None


@dataclass
class PairedTest:
    """The result of comparing one arm with the baseline.

    Attributes:
        name: ``McNemar`` or ``bootstrap`` (one seed, over items), ``seeds and items``, ``paired t``
            (over seeds, for values of whole runs), ``Newcombe`` or ``normal`` (an interval for
            independent samples), ``not enough seeds``, or ``none``.
        difference: arm - baseline.
        low, high: 95 % interval of the difference, if any.
        p: p value; ``p_holm``: corrected over all comparisons that are shown together.
        verdict: ``better``, ``worse``, ``unclear``, or ``unknown`` without a test or an interval,
            and until :func:`decide_together` has all tests that are shown together.
    """

    name: str
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: str = "unknown"

    def decide(self, higher_is_better: bool) -> None:
        """Set the verdict at the 5 % level, by the corrected p value, p value, or interval."""
        p = self.p if self.p_holm is None else self.p_holm
        if p is not None:
            clear = p < ALPHA
        elif self.low is not None and self.high is not None:
            clear = not self.low <= 0 <= self.high
        else:
            self.verdict = "unknown"
            return
        if clear and self.difference:
            self.verdict = "better" if (self.difference > 0) == higher_is_better else "worse"
        else:
            self.verdict = "unclear"


def decide_together(tests: Sequence[tuple[PairedTest, bool]]) -> None:
    """Correct the p values of these tests together (Holm) and set their verdicts.

    Args:
        tests: all tests that a reader sees at once, each with whether higher is better; those
            without a p value get no correction.
    """
    tested = [test for test, _ in tests if test.p is not None]
    corrected = holm([test.p for test in tested if test.p is not None])
    for test, p in zip(tested, corrected, strict=True):
        test.p_holm = p
    for test, higher in tests:
        test.decide(higher)


def compare_items(
    values_SN: np.ndarray, baseline_SN: np.ndarray, seed: int | np.random.Generator = 0
) -> PairedTest:
    """Test item values of runs paired by seed.

    With one seed, 0/1 items use McNemar's exact test, others the bootstrap. With several seeds,
    both seeds and items are samples and are resampled (:func:`crossed_bootstrap`).
    """
    if values_SN.shape != baseline_SN.shape or values_SN.ndim != 2 or not values_SN.size:
        raise ValueError(
            f"values_SN {values_SN.shape} and baseline_SN {baseline_SN.shape}: expected one shape "
            "(seeds, items), not empty"
        )
    difference_SN = values_SN - baseline_SN
    rng = np.random.default_rng(seed)  # a generator goes on
    mean = float(difference_SN.mean())
    if len(difference_SN) > 1:
        return PairedTest("seeds and items", mean, *crossed_bootstrap(difference_SN, rng))
    low, high, p = paired_bootstrap(difference_SN[0], rng)
    if np.isin([values_SN, baseline_SN], (0.0, 1.0)).all():
        gained, lost = int((difference_SN > 0).sum()), int((difference_SN < 0).sum())
        return PairedTest("McNemar", mean, low, high, mcnemar(gained, lost))
    return PairedTest("bootstrap", mean, low, high, p)


def compare_seeds(values_S: np.ndarray, baseline_S: np.ndarray) -> PairedTest:
    """Test values of whole runs, paired by seed, with Student's t.

    The result is "not enough seeds" if the spread between seeds cannot be estimated: for a single
    seed, or if all seeds have the same nonzero difference (infinite t). If all differences are 0, p
    is 1. The result is "none" if a value is not finite.
    """
    difference_S = np.asarray(values_S, float) - np.asarray(baseline_S, float)
    mean = float(difference_S.mean())
    if not np.isfinite(difference_S).all():
        return PairedTest("none", mean)
    if len(difference_S) > 1 and not difference_S.any():
        return PairedTest("paired t", 0.0, 0.0, 0.0, 1.0)
    # Equal differences may still differ by the rounding of the values that were subtracted.
    if len(difference_S) < 2 or np.ptp(difference_S) <= 1e-12 * np.abs(difference_S).max():
        return PairedTest("not enough seeds", mean)
    interval = t_interval(difference_S)
    p = float(stats.ttest_1samp(difference_S, 0.0).pvalue)
    return PairedTest("paired t", mean, interval.low, interval.high, p)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact p value for ``gained`` against ``lost`` discordant pairs."""
    if gained + lost == 0:
        return 1.0
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue)


def paired_bootstrap(
    difference_N: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Return low and high of the mean's percentile interval, and a p value.

    The p value is the share of resampled means, shifted to mean zero, that lie as far from zero as
    the observed one (Efron & Tibshirani 1993, section 16.4), counting the observed one. A single
    item has p value 1.
    """
    observed = float(difference_N.mean())
    if len(difference_N) == 1:
        return observed, observed, 1.0
    result = stats.bootstrap(
        (difference_N,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _BLOCK // len(difference_N)),
        confidence_level=1 - ALPHA,
        method="percentile",
        rng=rng,
    )
    low, high = result.confidence_interval
    return float(low), float(high), _p_value(result.bootstrap_distribution - observed, observed)


def crossed_bootstrap(
    difference_SN: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Return low and high of the interval of the mean, and a p value.

    Seeds and items are resampled independently (the pigeonhole bootstrap, Owen 2007, "The
    pigeonhole bootstrap", Annals of Applied Statistics 1:386), so many items alone do not make a
    difference certain without many seeds, nor the reverse. Resampling S seeds gives only (S-1)/S of
    their variance, which matters for few seeds, so deviations are scaled by sqrt(S / (S-1)). The p
    value is the share of resampled means, shifted to mean zero, as far from zero as the observed
    one.
    """
    seeds, items = difference_SN.shape
    # Drawing N of the items is drawing how often each distinct pattern comes, and few are distinct.
    patterns_PS, counts_P = np.unique(difference_SN.T, axis=0, return_counts=True)
    step = max(1, _BLOCK // len(counts_P))
    means = []
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        shares_BP = rng.multinomial(items, counts_P / items, size) / items
        weights_BS = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size) / seeds
        means.append(((shares_BP @ patterns_PS) * weights_BS).sum(1))
    observed = float(difference_SN.mean())
    deviations_B = (np.concatenate(means) - observed) * math.sqrt(seeds / (seeds - 1))
    low, high = np.quantile(deviations_B, [ALPHA / 2, 1 - ALPHA / 2])
    return observed + float(low), observed + float(high), _p_value(deviations_B, observed)


def _p_value(deviations_B: np.ndarray, observed: float) -> float:
    far = np.abs(deviations_B) >= abs(observed) - 1e-12
    return float((1 + far.sum()) / (1 + len(deviations_B)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down corrected p values, in the order given (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(1, factors * np.array(p_values)[order]))
    return corrected.tolist()


def wilson(share: float, n: int, z: float = Z) -> tuple[float, float]:
    """Return Wilson's score interval of a share of ``n`` items; 95 % by default.

    SciPy's version takes only integer counts, which a mean over several replies per item is not.
    """
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def normal(value: float, stderr: float) -> tuple[float, float]:
    """Return the 95 % normal interval of a value with this standard error."""
    return value - Z * stderr, value + Z * stderr


def newcombe(
    share_a: float, n_a: int, share_b: float, n_b: int, z: float = Z
) -> tuple[float, float]:
    """Return the hybrid score interval of ``share_b - share_a``, of two independent samples.

    Newcombe 1998, "Interval estimation for the difference between independent proportions",
    method 10; it is valid at shares of 0 and 1 too.
    """
    low_a, high_a = wilson(share_a, n_a, z)
    low_b, high_b = wilson(share_b, n_b, z)
    delta = share_b - share_a
    return (
        delta - math.hypot(share_b - low_b, high_a - share_a),
        delta + math.hypot(high_b - share_b, share_a - low_a),
    )


def newcombe_p(share_a: float, n_a: int, share_b: float, n_b: int) -> float:
    """Return the p value that inverts :func:`newcombe`: below 0.05 if its interval excludes 0.

    It is that of the narrowest interval which contains 0; intervals grow with ``z``.
    """
    low_z, high_z = 0.0, _LARGEST_Z
    for _ in range(60):
        z = (low_z + high_z) / 2
        low, high = newcombe(share_a, n_a, share_b, n_b, z)
        if low <= 0 <= high:
            high_z = z
        else:
            low_z = z
    return 2 * float(stats.norm.sf(high_z))


def relative_gain(cells: Iterable[tuple[float, float, bool]]) -> float | None:
    """Return the unweighted mean of method / baseline - 1 over (method, baseline, higher) cells.

    A cell is one model on one benchmark; pool the cells of several models for a table's gain. If
    lower is better, the cell counts baseline / method - 1, so a gain is always positive. None if a
    denominator is 0.
    """
    ratios = [(a, b) if higher else (b, a) for a, b, higher in cells]
    if not ratios:
        raise ValueError("relative gain needs at least one cell")
    if any(denominator == 0 for _, denominator in ratios):
        return None
    return sum(numerator / denominator - 1 for numerator, denominator in ratios) / len(ratios)
