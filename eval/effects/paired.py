"""Differences paired by seed, with t-intervals, and what they say about a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["reproduced", "sign only", "not reproduced", "opposite", "not run"]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % t-interval; infinite ends for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean of independent values and its two-sided Student interval.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    from scipy.stats import t

    array = np.asarray(values, dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"values: got {array.tolist()}, wanted at least one, all finite")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, -np.inf, np.inf, 1)
    half = float(t.ppf(0.5 + level / 2, array.size - 1) * array.std(ddof=1) / array.size**0.5)
    return Interval(mean, mean - half, mean + half, int(array.size))


def verdict_of_sign(found: Interval, sign: int) -> Verdict:
    """Whether the difference has the claimed sign (+1 or -1), and its interval leaves 0 out.

    ``opposite``: significant the other way. With one seed nothing is significant.
    """
    low, high = sorted((sign * found.low, sign * found.high))
    if low > 0:
        return "reproduced"
    if high < 0:
        return "opposite"
    return "sign only" if sign * found.mean > 0 else "not reproduced"


def verdict_of_no_change(found: Interval, margin: float) -> Verdict:
    """Whether the interval lies within ``±margin``; ``sign only``: it holds 0, but is wider."""
    if -margin <= found.low and found.high <= margin:
        return "reproduced"
    return "sign only" if found.low <= 0 <= found.high else "not reproduced"
