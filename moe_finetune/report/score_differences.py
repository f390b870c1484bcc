"""Scores and their differences, as shown on the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_finetune.evaluation.score import Score, compare_scores, same_prompts
from moe_finetune.evaluation.statistics import PairedTest, decide_together
from moe_finetune.report.markup import DASH, Markup, number, signed, tag

SIGNS = {
    "better": "▲ better",
    "worse": "▼ worse",
    "unclear": "● no clear difference",
    "unknown": "○ no interval",
}


def verdict_mark(verdict: str) -> Markup:
    """Return a verdict in its color."""
    return tag("span", SIGNS[verdict], class_=f"verdict {verdict}")


def score_text(score: Score, value: float | None = None) -> str:
    """Return the score (or another value on its scale): shares as percentages."""
    value = score.value if value is None else value
    if math.isnan(value):
        return DASH
    return f"{100 * value:.1f} %" if score.is_share else number(value)


@dataclass(frozen=True)
class Difference:
    """``run − baseline`` with its 95 % interval; ``verdict`` is better, worse, unclear or unknown.

    ``unknown``: there is no interval, or one of the scores is missing. ``paired``: compared item by
    item; ``other_items``: both have items, but different ones.
    """

    value: float
    low: float
    high: float
    verdict: str
    is_share: bool
    paired: bool = False
    other_items: bool = False

    def text(self) -> str:
        """Return the difference as text: percentage points for shares."""
        if math.isnan(self.value):
            return DASH
        if self.is_share:
            return f"{signed(100 * self.value, 1)} pp"
        return signed(self.value, self._digits())

    def _digits(self) -> int:
        """Return the decimals that show two digits of the interval's width (or of the value)."""
        size = self.high - self.low if not math.isnan(self.low) else abs(self.value)
        return max(0, 1 - math.floor(math.log10(size))) if size > 0 else 1

    def interval_text(self) -> str:
        if math.isnan(self.low):
            return "no interval"
        scale, digits = (100, 1) if self.is_share else (1, self._digits())
        low, high = (signed(scale * end, digits) for end in (self.low, self.high))
        return f"[{low}, {high}]"


def differences(pairs: Sequence[tuple[Score, Score]]) -> list[Difference]:
    """Compare pairs (baseline, run) that a page shows together; their verdicts are corrected."""
    tests = [compare_scores([baseline], [run]) for baseline, run in pairs]
    decide_together(
        [(test, run.higher_is_better) for test, (_, run) in zip(tests, pairs, strict=True)]
    )
    return [_difference(test, *pair) for test, pair in zip(tests, pairs, strict=True)]


def difference(baseline: Score, run: Score) -> Difference:
    """Compare two scores that are shown alone."""
    return differences([(baseline, run)])[0]


def _difference(test: PairedTest, baseline: Score, run: Score) -> Difference:
    low, high = (math.nan if end is None else end for end in (test.low, test.high))
    both = bool(baseline.items and run.items)
    return Difference(
        test.difference, low, high, test.verdict,
        is_share=baseline.is_share and run.is_share,
        paired=test.name in ("McNemar", "bootstrap"),
        other_items=both and not same_prompts(baseline, run),
    )  # fmt: skip
