"""What a difference, paired by seed, says about a claim."""

from __future__ import annotations

from typing import Literal

from moe_finetune.metrics.statistics import Interval

Verdict = Literal["reproduced", "sign only", "not reproduced", "opposite", "not run"]


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
