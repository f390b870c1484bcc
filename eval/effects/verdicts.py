"""What a difference, paired by seed, says about a claim."""

from __future__ import annotations

from typing import Literal

from moe_finetune.metrics.statistics import Interval

Verdict = Literal["reproduced", "sign only", "not reproduced", "opposite", "not run"]


def verdict_of_sign(difference: Interval, sign: int) -> Verdict:
    """Whether the difference has the claimed sign (+1 or -1), and its interval leaves 0 out.

    ``opposite``: significant the other way. With one seed nothing is significant.
    """
    low, high = sorted((sign * difference.low, sign * difference.high))
    if low > 0:
        return "reproduced"
    if high < 0:
        return "opposite"
    return "sign only" if sign * difference.mean > 0 else "not reproduced"


def verdict_of_no_change(difference: Interval, margin: float) -> Verdict:
    """Whether the interval lies within ``±margin``; ``sign only``: it contains 0, but is wider."""
    if -margin <= difference.low and difference.high <= margin:
        return "reproduced"
    return "sign only" if difference.low <= 0 <= difference.high else "not reproduced"
