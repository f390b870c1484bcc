"""The experts in numbers: routing metrics before and after, and what each run changed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_finetune.metrics.words import Word, word
from moe_finetune.report.context import Cell, Report, folded, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.read_runs import Run

LEADING = (
    "expert_overlap", "score_variance", "max_violation", "entropy",
    "score_entropy", "activation_cosine", "output_cosine", "coupling_mass", "router_cosine",
)  # fmt: skip
UNCHANGED = 0.02
"""Relative changes below this count as none."""


@dataclass(frozen=True)
class Change:
    """A metric of a run against its reference."""

    word: Word
    reference: float
    value: float
    collapsed: bool = False

    @property
    def share(self) -> float:
        """The change divided by the reference; NaN if one is missing or the reference is 0."""
        if not self.reference or not math.isfinite(self.reference + self.value):
            return math.nan
        return (self.value - self.reference) / abs(self.reference)

    @property
    def moved(self) -> bool:
        """Return whether the change is worth mentioning."""
        return abs(self.share) >= UNCHANGED

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` by the metric's good direction; else ``unclear``.

        With routing collapse nothing counts as better: two experts that take every token also have
        no overlap.
        """
        if not self.moved or not self.word.good:
            return "unclear"
        if self.share * self.word.good < 0:
            return "worse"
        return "unclear" if self.collapsed else "better"

    @property
    def percent(self) -> str:
        """The change in percent, with its sign."""
        if not math.isfinite(self.share):
            return DASH
        digits = 0 if abs(self.share) >= 0.1 else 1
        return f"{100 * self.share:+.{digits}f}\u00a0%".replace("-", "−")

    def describe(self) -> str:
        """``expert overlap −42 % (0.386 → 0.225)``; only the value if there is no reference."""
        name = self.word.name
        name = name if name == "MaxVio" else name[:1].lower() + name[1:]
        if not math.isfinite(self.share):
            return f"{name} {number(self.value)}"
        return f"{name} {self.percent} ({number(self.reference)} → {number(self.value)})"


def before_and_after(run: Run, name: str) -> tuple[float, float]:
    """A metric's mean over layers before and after fine-tuning; NaN if it was not measured.

    If the snapshots lack the metric, the last evaluation's value is used.
    """
    snapshots = [
        r.metrics().get(name) if r else None for r in (run.routing_before, run.routing_after)
    ]
    start, end = (metric.mean if metric else math.nan for metric in snapshots)
    curve = run.curves.get(f"eval_routing/{name}")
    return start, curve.values[-1] if curve and math.isnan(end) else end


def expert_changes(report: Report, run: Run, names: Sequence[str] = LEADING) -> list[Change]:
    """Metrics against the baseline run, or before training; largest change first."""
    changes = []
    for name in names:
        start, value = before_and_after(run, name)
        reference = before_and_after(report.baseline, name)[1] if report.baseline else start
        if math.isfinite(value):
            changes.append(Change(word(f"routing/{name}"), reference, value))
    return sorted(changes, key=lambda change: -abs(change.share) if change.moved else 0.0)


def metric_names(report: Report) -> list[str]:
    """Every metric that the table of experts has, the leading ones first."""
    names = dict.fromkeys(LEADING)
    for run in report.runs:
        for routing in (run.routing_before, run.routing_after):
            names |= dict.fromkeys(routing.metrics() if routing else ())
        logged = (name for name in run.curves if name.startswith("eval_routing/"))
        names |= dict.fromkeys(name.removeprefix("eval_routing/") for name in logged)
    return list(names)


def experts_table(report: Report) -> Markup | None:
    """The leading metrics that any run changed; below, folded, the other and unchanged ones."""
    measures = {
        name: [before_and_after(run, name) for run in report.runs] for name in metric_names(report)
    }
    has_before = any(math.isfinite(b) for pairs in measures.values() for b, _ in pairs)
    base = report.baseline
    compared = report.runs[1:] if base else report.runs if has_before else []
    leading: list[list[Cell]] = []
    others: list[list[Cell]] = []
    unchanged: list[list[Cell]] = []
    for name, pairs in measures.items():
        ends = [value for _, value in pairs]
        if not any(map(math.isfinite, ends)):
            continue
        about = word(f"routing/{name}")
        start = next((b for b, _ in pairs if math.isfinite(b)), math.nan)
        reference = ends[0] if base else start
        changes = [
            Change(about, reference, value, collapsed=run.collapse is not None)
            for run, value in zip(compared, ends[len(ends) - len(compared) :], strict=True)
        ]
        row: list[Cell] = [join([about.name, tag("span", about.meaning, class_="note")])]
        row += [tag("span", c.percent, class_=f"verdict {c.verdict}") for c in changes]
        row += [number(start)] if has_before else []
        row += [number(value) for value in ends]
        same = changes and all(abs(c.share) < UNCHANGED for c in changes)
        kind = unchanged if same else leading if name in LEADING or not changes else others
        kind.append(row)
    columns: list[Cell] = ["Metric"]
    columns += [join([report.swatch(run), " change"]) for run in compared]
    columns += ["Before"] if has_before else []
    if base:
        columns += [report.swatch(run) for run in report.runs]
    else:
        columns += ["After" if has_before else "Value"]
    caption = "Experts and router, mean over layers"
    if compared:
        caption += f"; change against {base.label if base else 'before fine-tuning'}"
        caption += "; green: to even load and experts that differ, red: away from them"
    folds = (
        (others, f"{len(others)} more {_metrics(others)}"),
        (unchanged, f"{len(unchanged)} {_metrics(unchanged)} that changed by less than "
                    f"{100 * UNCHANGED:g} %"),
    )  # fmt: skip
    parts = [table(caption, columns, leading) if leading else None]
    parts += [folded(title, table(title, columns, rows)) for rows, title in folds if rows]
    return join(parts) if any(parts) else None


def _metrics(rows: list[list[Cell]]) -> str:
    return "metric" if len(rows) == 1 else "metrics"
