"""The experts in numbers: routing metrics before and after, and what each run changed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_finetune.metrics.words import Word, word
from moe_finetune.report.context import Report, folded, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.runs import Run

FIRST = (
    "expert_overlap", "score_variance", "max_violation", "entropy", "routing_entropy",
    "score_entropy", "activation_cosine", "output_cosine", "coupling_mass", "router_cosine",
)  # fmt: skip
NOTHING = 0.02
"""Changes below this share are called none."""


@dataclass(frozen=True)
class Changed:
    """A metric of a run against what it is compared with."""

    word: Word
    reference: float
    value: float

    @property
    def share(self) -> float:
        """The change as a share of the reference; NaN where that says nothing."""
        if not self.reference or not math.isfinite(self.reference + self.value):
            return math.nan
        return (self.value - self.reference) / abs(self.reference)

    @property
    def moved(self) -> bool:
        """Whether the change is worth a word."""
        return abs(self.share) >= NOTHING

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` by the metric's good way; else ``unclear``."""
        if not self.moved or not self.word.good:
            return "unclear"
        return "better" if self.share * self.word.good > 0 else "worse"


def measured(run: Run, name: str) -> tuple[float, float]:
    """A metric before and after fine-tuning, mean over layers.

    Of the snapshots; what these do not hold is that of the last evaluation while training. NaN
    where there is none.
    """
    ends = [r.metrics().get(name) if r else None for r in (run.before, run.after)]
    before, after = (metric.mean if metric else math.nan for metric in ends)
    curve = run.curves.get(f"eval_routing/{name}")
    return before, curve.values[-1] if curve and math.isnan(after) else after


def expert_metrics(report: Report, run: Run) -> list[Changed]:
    """The metrics to lead with, against the baseline run or before: what moved most is first."""
    found = []
    for name in FIRST:
        before, value = measured(run, name)
        reference = measured(report.baseline, name)[1] if report.baseline else before
        if math.isfinite(reference + value):
            found.append(Changed(word(f"routing/{name}"), reference, value))
    return sorted(found, key=lambda m: -abs(m.share) if m.moved else 0.0)


def _names(report: Report) -> list[str]:
    known = dict.fromkeys(FIRST)
    for run in report.runs:
        for routing in (run.before, run.after):
            known |= dict.fromkeys(routing.metrics() if routing else ())
        heads = (name for name in run.curves if name.startswith("eval_routing/"))
        known |= dict.fromkeys(name.removeprefix("eval_routing/") for name in heads)
    return list(known)


def told(changed: Changed) -> str:
    """A change as part of a sentence."""
    name = changed.word.name
    name = name if name == "MaxVio" else name[:1].lower() + name[1:]
    verb = "rose" if changed.value > changed.reference else "fell"
    percent = change_text(changed.reference, changed.value).lstrip("+−")
    return f"{name} {verb} by {percent} ({number(changed.reference)} → {number(changed.value)})"


def change_text(reference: float, value: float) -> str:
    """The change in percent, with its sign."""
    share = Changed(Word(""), reference, value).share
    if not math.isfinite(share):
        return DASH
    digits = 0 if abs(share) >= 0.1 else 1
    return f"{100 * share:+.{digits}f}\u00a0%".replace("-", "−")


def experts_table(report: Report) -> Markup | None:
    """The metrics that some run moved; those that hardly differ below, folded."""
    compared = report.runs[1:] or report.runs
    moving: list[list[object]] = []
    still: list[list[object]] = []
    for name in _names(report):
        values = [measured(run, name) for run in report.runs]
        if not any(math.isfinite(after) for _, after in values):
            continue
        about = word(f"routing/{name}")
        before = next((b for b, _ in values if math.isfinite(b)), math.nan)
        reference = values[0][1] if report.baseline else before
        changes = [Changed(about, reference, after) for _, after in values[-len(compared) :]]
        row = _row(about, before, [after for _, after in values], changes)
        (moving if any(c.moved for c in changes) else still).append(row)
    columns: list[object] = [
        "Metric, mean over layers",
        "Before",
        *([report.swatch(run) for run in report.runs] if report.baseline else ["After"]),
        *(join([report.swatch(run), " change"]) for run in compared),
    ]
    whose = report.baseline.label if report.baseline else "before fine-tuning"
    parts = [
        table(f"Experts and router, change against {whose}", columns, moving) if moving else None,
        folded(
            f"{len(still)} metrics that hardly differ (less than {100 * NOTHING:g} %)",
            table("Experts and router: what hardly differs", columns, still) if still else None,
        ),
    ]
    return join(parts) if moving or still else None


def _row(about: Word, before: float, values: list[float], changes: list[Changed]) -> list[object]:
    told = [
        tag("span", change_text(c.reference, c.value), class_=f"verdict {c.verdict}")
        for c in changes
    ]
    name = join([about.name, tag("span", about.meaning, class_="note")])
    return [name, number(before), *map(number, values), *told]
