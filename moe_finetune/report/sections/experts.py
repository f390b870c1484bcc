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
    collapsed: bool = False

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
        """``better`` or ``worse`` by the metric's good way; else ``unclear``.

        Nothing is better where the router has collapsed: two experts that take every token have no
        overlap either.
        """
        if not self.moved or not self.word.good:
            return "unclear"
        if self.share * self.word.good < 0:
            return "worse"
        return "unclear" if self.collapsed else "better"


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
        if math.isfinite(value):
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
    """A change as part of a sentence; the value where there is nothing to compare it with."""
    name = changed.word.name
    name = name if name == "MaxVio" else name[:1].lower() + name[1:]
    if not math.isfinite(changed.share):
        return f"{name} is {number(changed.value)}"
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


def _metrics(rows: list[list[object]]) -> str:
    return "metric" if len(rows) == 1 else "metrics"


def experts_table(report: Report) -> Markup | None:
    """The metrics to lead with that some run moved; below, folded, the others and what is alike."""
    base = report.baseline
    measures = {name: [measured(run, name) for run in report.runs] for name in _names(report)}
    has_before = any(math.isfinite(before) for values in measures.values() for before, _ in values)
    compared = report.runs[1:] if base else report.runs if has_before else []
    lead: list[list[object]] = []
    others: list[list[object]] = []
    still: list[list[object]] = []
    for name, values in measures.items():
        if not any(math.isfinite(after) for _, after in values):
            continue
        about = word(f"routing/{name}")
        before = next((b for b, _ in values if math.isfinite(b)), math.nan)
        reference = values[0][1] if base else before
        changes = [
            Changed(about, reference, after, collapsed=run.collapse is not None)
            for run, (_, after) in zip(compared, values[len(values) - len(compared) :], strict=True)
        ]
        row: list[object] = [join([about.name, tag("span", about.meaning, class_="note")])]
        row += [number(before)] if has_before else []
        row += [number(after) for _, after in values]
        row += [
            tag("span", change_text(c.reference, c.value), class_=f"verdict {c.verdict}")
            for c in changes
        ]
        same = changes and all(abs(c.share) < NOTHING for c in changes)
        (still if same else lead if name in FIRST or not changes else others).append(row)
    columns: list[object] = [
        "Metric, mean over layers",
        *(["Before"] if has_before else []),
        *(
            [report.swatch(run) for run in report.runs]
            if base
            else ["After" if has_before else "Value"]
        ),
        *(join([report.swatch(run), " change"]) for run in compared),
    ]
    caption = "Experts and router"
    if compared:
        caption += f", change against {base.label if base else 'before fine-tuning'}"
    folds = (
        (others, f"{len(others)} more {_metrics(others)}"),
        (still, f"{len(still)} {_metrics(still)} with less than {100 * NOTHING:g} % difference"),
    )
    parts = [table(caption, columns, lead) if lead else None]
    parts += [folded(title, table(title, columns, rows)) for rows, title in folds if rows]
    return join(parts) if any(parts) else None
