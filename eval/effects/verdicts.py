"""Verdicts on claims, from differences paired by seed."""

from typing import Literal

from moe_finetune.metrics.statistics import Interval

Verdict = Literal["reproduced", "sign only", "not reproduced", "opposite", "not run"]


def verdict_of_sign(difference: Interval, sign: int) -> Verdict:
    """Whether the difference has the claimed sign (+1 or -1) and its interval excludes 0.

    ``opposite``: significant with the other sign. With one seed nothing is significant.
    """
    low, high = sorted((sign * difference.low, sign * difference.high))
    if low > 0:
        return "reproduced"
    if high < 0:
        return "opposite"
    return "sign only" if sign * difference.mean > 0 else "not reproduced"


def verdict_of_no_change(difference: Interval, margin: float) -> Verdict:
    """Whether the interval is within ``±margin``; ``sign only``: it is wider but contains 0."""
    if -margin <= difference.low and difference.high <= margin:
        return "reproduced"
    return "sign only" if difference.low <= 0 <= difference.high else "not reproduced"
