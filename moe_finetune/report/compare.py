"""Scores, and what can be said about the difference of two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from moe_finetune.evaluation.comparison import item_values
from moe_finetune.evaluation.results import TaskResult
from moe_finetune.metrics.statistics import ALPHA, compare_items, newcombe, normal, wilson
from moe_finetune.report.markup import DASH, is_number, number, signed

ZERO_ONE = ("exact_match", "acc", "acc_norm", "accuracy", "pass@1", "pass_at_1")
Items = dict[tuple[str, str, int], tuple[str, float]]
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "error", "nll")


@dataclass(frozen=True)
class Score:
    """One benchmark's result. ``n`` items; ``stderr`` of the mean; NaN where unknown."""

    value: float
    metric: str = ""
    stderr: float = math.nan
    n: int | None = None
    chance: float = math.nan
    higher_is_better: bool = True
    others: dict[str, tuple[float, float]] = field(default_factory=dict)  # value, stderr
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    task: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def items(self) -> Items:
        """Hash of the prompts and value of each item; empty where the samples are not there."""
        name = self.task.get("samples")
        if self.folder is None or not name or not (self.folder / name).is_file():
            return {}
        return item_values(self.folder, cast(TaskResult, self.task))

    @classmethod
    def parse(cls, task: dict[str, Any], folder: Path | None = None) -> Score:
        """Read a task of the ``results.json`` in ``folder``; what is missing is unknown."""
        metric = str(task.get("metric") or "")
        higher = task.get("higher_is_better")
        if higher is None:
            higher = not any(word in metric.lower() for word in LOWER_IS_BETTER)
        return cls(
            value=_float(task.get("value")),
            metric=metric,
            stderr=_float(task.get("stderr")),
            n=int(n) if is_number(n := task.get("n")) and math.isfinite(n) else None,
            chance=_float(task.get("chance")),
            higher_is_better=bool(higher),
            others={
                name: (_float(other.get("value")), _float(other.get("stderr")))
                for name, other in (task.get("metrics") or {}).items()
                if isinstance(other, dict)
            },
            notes=tuple(map(str, task.get("notes") or ())),
            folder=folder,
            task=task,
        )

    @property
    def is_share(self) -> bool:
        """Whether the value is a share of items, to be read as a percentage."""
        names = (*ZERO_ONE, "f1", "match", "rate", "share", "pass")
        return 0 <= self.value <= 1 and any(name in self.metric.lower() for name in names)

    @property
    def is_zero_one(self) -> bool:
        """Whether every item counts 0 or 1, so that the score is a binomial share."""
        if self.n is None or self.n < 2 or not 0 <= self.value <= 1:
            return False
        if self.metric.split(",")[0].lower() not in ZERO_ONE:
            return False
        expected = math.sqrt(self.value * (1 - self.value) / (self.n - 1))
        return math.isnan(self.stderr) or math.isclose(self.stderr, expected, rel_tol=0.1)

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval: Wilson's for shares of 0/1 items, else value ± 1.96 stderr."""
        if math.isnan(self.value):
            return None
        if self.is_zero_one:
            assert self.n is not None
            return wilson(self.value, self.n)
        if math.isnan(self.stderr):
            return None
        return normal(self.value, self.stderr)

    def text(self, value: float | None = None) -> str:
        """Return the value (or another on the same scale) for people: shares as percentages."""
        value = self.value if value is None else value
        if math.isnan(value):
            return DASH
        return f"{100 * value:.1f} %" if self.is_share else number(value)


@dataclass(frozen=True)
class Difference:
    """``run − baseline`` with its 95 % interval; ``verdict`` is better, worse, unclear or unknown.

    ``unknown``: there is no interval, or one of the scores is missing. ``paired``: item by item;
    ``other_items``: both have their items, and these are not the same.
    """

    value: float
    low: float
    high: float
    verdict: str
    is_share: bool
    paired: bool = False
    other_items: bool = False

    def text(self) -> str:
        """Return the difference for people: percentage points for shares."""
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


def difference(baseline: Score, run: Score) -> Difference:
    """Compare two scores: item by item as the verb ``compare`` does, or as independent samples.

    Where both answered the same prompts, the interval is the paired bootstrap's and the verdict
    that of its test at 5 %. Otherwise, for shares of 0/1 items, Newcombe's interval; else
    ``± 1.96 sqrt(stderr² + stderr²)``.
    """
    delta = run.value - baseline.value
    is_share = baseline.is_share and run.is_share
    low = high = math.nan
    pairs = _pairs(baseline, run)
    if pairs is not None:
        test = compare_items(*pairs)
        assert test.low is not None and test.high is not None and test.p is not None
        verdict = _verdict(delta, test.p >= ALPHA, run)
        return Difference(delta, test.low, test.high, verdict, is_share, paired=True)
    if baseline.is_zero_one and run.is_zero_one:
        assert baseline.n is not None and run.n is not None
        low, high = newcombe(baseline.value, baseline.n, run.value, run.n)
    elif not math.isnan(baseline.stderr + run.stderr + delta):
        low, high = normal(delta, math.hypot(baseline.stderr, run.stderr))
    verdict = "unknown" if math.isnan(low) else _verdict(delta, low <= 0 <= high, run)
    both = bool(baseline.items and run.items)
    return Difference(
        delta, low, high, verdict, is_share, other_items=both and not _same_prompts(baseline, run)
    )


def _verdict(delta: float, unclear: bool, run: Score) -> str:
    if unclear:
        return "unclear"
    return "better" if (delta > 0) == run.higher_is_better else "worse"


def _pairs(baseline: Score, run: Score) -> tuple[np.ndarray, np.ndarray] | None:
    """The run's and the baseline's values by item, shape (1, items) each.

    None where the items are not the same, or not the score's.
    """
    first, second = baseline.items, run.items
    if not first or baseline.metric != run.metric or not _same_prompts(baseline, run):
        return None
    base_1N, run_1N = (np.array([[side[key][1] for key in first]]) for side in (first, second))
    # A corpus metric has no items' values, and a mean over groups of items is not theirs.
    delta, scale = run.value - baseline.value, max(1.0, abs(run.value))
    same = math.isclose(float((run_1N - base_1N).mean()), delta, rel_tol=0.0, abs_tol=1e-4 * scale)
    return (run_1N, base_1N) if same else None


def _same_prompts(baseline: Score, run: Score) -> bool:
    first, second = baseline.items, run.items
    return first.keys() == second.keys() and all(first[k][0] == second[k][0] for k in first)


def _float(value: Any) -> float:
    return float(value) if is_number(value) else math.nan
