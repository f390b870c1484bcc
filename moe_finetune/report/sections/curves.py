"""All values logged over training: charts where runs differ, the rest folded."""

import math
from collections.abc import Iterable

import numpy as np

from moe_finetune.metrics.words import word
from moe_finetune.report.charts.lines import SMOOTH_FROM, Series, line_chart, moving_mean
from moe_finetune.report.context import Cell, Report, Section, figure, folded, group, table
from moe_finetune.report.markup import Markup, join, number, tag
from moe_finetune.report.read_runs import Curve, Run, ends

GROUPS = (
    *("Loss", "Loss terms", "Routing during training", "Optimization", "Other logged values"),
    "Scores",
)
OPTIMIZATION = ("learning_rate", "grad_norm", "tokens_per_second", "mean_token_accuracy")
POINTS = 3  # fewer points are not a curve; the table has them
DIFFERENT = 0.05
"""Runs differ where their curves lie this share of the chart's range apart on average; one run's
curve is shown where it moves by this share of its size."""
REDUNDANT = (
    "routing/entropy_share",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)
"""routing/entropy in another unit, and the speed of evaluations: only in the table."""


def _group(name: str) -> str:
    if name in ("loss", "eval_loss"):
        return GROUPS[0]
    if name.startswith("losses/"):
        return GROUPS[1]
    if name.startswith(("routing/", "eval_routing/")):
        return GROUPS[2]
    if name.startswith("scores/"):
        return GROUPS[5]
    return GROUPS[3 if name in OPTIMIZATION else 4]


def _render(report: Report) -> Markup | None:
    names = list(dict.fromkeys(name for run in report.runs for name in run.curves))
    if not names:
        report.note_missing("Training curves", "no metrics.jsonl in the run's folder")
        return None
    for run in report.runs:
        if not run.curves:
            report.note_missing(f"Training curves of {run.label}", "no metrics.jsonl in its folder")
    drawn = [name for name in names if _is_drawn(report, name, names)]
    different = [name for name in drawn if _differs(report, name)]
    alike = "that hardly differ" if report.baseline else "that hardly change"
    similar = [name for name in drawn if name not in different]
    return join(
        [
            _legend(report),
            _smoothing(report),
            *_groups(report, different),
            folded(
                f"{len(similar)} {'curve' if len(similar) == 1 else 'curves'} {alike}",
                *_groups(report, similar),
            ),
            _details(report, names),
            _not_numbers(report),
        ]
    )


def _is_drawn(report: Report, name: str, names: Iterable[str]) -> bool:
    """Return whether this is a curve and no other shows the same quantity with more points."""
    trained = name.removeprefix("eval_")
    twice = name in REDUNDANT or (name != trained != "loss" and trained in names)
    points = max(len(run.curves[name].values) for run in report.runs if name in run.curves)
    return points >= POINTS and not twice


def _differs(report: Report, name: str) -> bool:
    curves = [run.curves[name] for run in report.runs if name in run.curves]
    finite = [v for curve in curves for v in curve.values if math.isfinite(v)]
    if not finite or len(curves) < len(report.runs):
        return True  # missing values, and values that are not finite, are always shown
    if len(curves) == 1:
        start, end = ends(curves[0])
        return _group(name) == GROUPS[0] or abs(end - start) > DIFFERENT * max(abs(start), abs(end))
    reach = max(finite) - min(finite)
    first, *others = (_smooth(curve) for curve in curves)
    for other in others:
        steps = sorted(set(first) & set(other))
        distances = [abs(first[step] - other[step]) for step in steps]
        if not steps or np.nanmean(distances) > DIFFERENT * reach:
            return True
    return False


def _smooth(curve: Curve) -> dict[float, float]:
    return dict(zip(curve.steps, moving_mean(curve.values), strict=True))


def _groups(report: Report, names: list[str]) -> list[Markup]:
    groups = []
    for title in GROUPS:
        figures = [
            _figure(report, name, runs)
            for name in names
            if _group(name) == title
            for runs in _comparable(report, name)
        ]
        if figures:
            groups.append(group(title, tag("div", figures, class_="grid")))
    return groups


def _legend(report: Report) -> Markup | None:
    if report.baseline is None:
        return None
    return tag("ul", [tag("li", report.swatch(run)) for run in report.runs], class_="key")


def _smoothing(report: Report) -> Markup | None:
    long = [c for run in report.runs for c in run.curves.values() if len(c.values) >= SMOOTH_FROM]
    if not long:
        return None
    text = "Bold lines are moving means over a fifteenth of the run; the logged values are faint."
    return tag("p", text, class_="intro")


def _comparable(report: Report, name: str) -> list[list[Run]]:
    """The runs with this curve; losses of another stage or base model in a figure of their own."""
    holders = [run for run in report.runs if name in run.curves]
    if _group(name) != GROUPS[0]:
        return [holders]
    keys = list(dict.fromkeys((run.stage, run.model) for run in holders))
    return [[run for run in holders if (run.stage, run.model) == key] for key in keys]


def _figure(report: Report, name: str, holders: list[Run]) -> Markup:
    series = [
        Series(
            run.label,
            report.color(run),
            run.curves[name].steps,
            run.curves[name].values,
            kind="baseline" if run is report.baseline else "",
        )
        for run in holders
    ]
    about = word(name)
    notes = [about.meaning] if about.meaning else []
    broken = sum(not math.isfinite(v) for run in holders for v in run.curves[name].values)
    if broken:
        notes.append(f"{broken} values are not finite")
    title = _title(about.name, [(run, run.curves[name]) for run in holders])
    chart = line_chart(f"{about.name} over training steps", title, series)
    return figure(title, chart, note="; ".join(notes) or None)


def _title(name: str, curves: list[tuple[Run, Curve]]) -> str:
    """A title with the curve's start and end for one run, or the end values of several."""
    last = [(ends(curve)[1], run.label) for run, curve in curves]
    finite = [end for end in last if not math.isnan(end[0])]
    if not finite:
        return f"{name}: no finite value"
    if len(curves) == 1:
        start, end = ends(curves[0][1])
        change = abs(end - start) / (max(abs(start), abs(end)) or 1.0)
        verb = "hardly changes" if change < 0.01 else "falls" if end < start else "rises"
        return f"{name} {verb} in {curves[0][0].label}: {number(start)} → {number(end)}"
    (least, low_run), (most, high_run) = min(finite), max(finite)
    if number(least) == number(most):
        return f"{name} ends at {number(least)} in all runs"
    if len(last) == 2:
        return f"{name} ends at {' and '.join(f'{number(end)} ({run})' for end, run in last)}"
    return f"{name} ends between {number(least)} ({low_run}) and {number(most)} ({high_run})"


def _details(report: Report, names: list[str]) -> Markup | None:
    rows: list[list[Cell]] = []
    for name in names:
        for run in report.runs:
            if name in run.curves:
                curve = run.curves[name]
                start, end = ends(curve)
                finite = [v for v in curve.values if math.isfinite(v)]
                least = number(min(finite, default=math.nan))
                most = number(max(finite, default=math.nan))
                points = number(len(curve.values))
                rows.append([name, run.label, points, number(start), number(end), least, most])
    columns: list[Cell] = ["Logged value", "Run", "Points", "Start", "End", "Least", "Greatest"]
    return folded("Every logged value in numbers", table("Curves in numbers", columns, rows))


def _not_numbers(report: Report) -> Markup | None:
    rows: list[list[Cell]] = []
    for run in report.runs:
        for name, value in run.last_values.items():
            text = str(value)
            rows.append([name, run.label, text if len(text) < 200 else f"{text[:200]}…"])
    caption = "Logged values that are not numbers"
    grid = table(caption, ["Logged value", "Run", "Last value"], rows) if rows else None
    return folded(caption, grid)


CURVES = Section("curves", "Training", _render)
