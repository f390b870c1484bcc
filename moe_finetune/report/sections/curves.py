"""Loss, loss terms, routing and everything else that was logged, over the training steps."""

from __future__ import annotations

import math

from moe_finetune.metrics.words import word
from moe_finetune.report.charts.lines import SMOOTH_FROM, Series, line_chart
from moe_finetune.report.context import Report, Section, figure, group, table
from moe_finetune.report.markup import Markup, join, number, tag
from moe_finetune.report.numbers import ends
from moe_finetune.report.runs import Curve, Run

GROUPS = ("Loss", "Loss terms", "Routing during training", "Optimisation")
OTHERS = "Other logged values"
OPTIMISATION = ("learning_rate", "grad_norm", "tokens_per_second", "mean_token_accuracy")


def _group(name: str) -> str:
    if name in ("loss", "eval_loss"):
        return GROUPS[0]
    if name.startswith("losses/"):
        return GROUPS[1]
    if name.startswith(("routing/", "eval_routing/")):
        return GROUPS[2]
    return GROUPS[3] if name in OPTIMISATION else OTHERS


def _render(report: Report) -> Markup | None:
    names = list(dict.fromkeys(name for run in report.runs for name in run.curves))
    if not names:
        report.lacks("Training curves", "no metrics.jsonl in the run's folder")
        return None
    for run in report.runs:
        if not run.curves:
            report.lacks(f"Training curves of {run.label}", "no metrics.jsonl in its folder")
    parts: list[Markup | None] = [_legend(report), _smoothing(report)]
    for title in GROUPS:
        members = [name for name in names if _group(name) == title]
        if members:
            grid = tag("div", [_figure(report, name) for name in members], class_="grid")
            parts.append(group(title, grid))
    # what was logged once, such as the totals at the end, is in the table only
    others = [n for n in names if _group(n) == OTHERS and _points(report, n) > 1]
    if others:
        grid = tag("div", [_figure(report, name) for name in others], class_="grid")
        parts.append(tag("details", tag("summary", OTHERS), grid))
    return join([*parts, _details(report, names), _not_numbers(report)])


def _points(report: Report, name: str) -> int:
    return max(len(run.curves[name].values) for run in report.runs if name in run.curves)


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


def _figure(report: Report, name: str) -> Markup:
    holders = [run for run in report.runs if name in run.curves]
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
    title = _title(report, about.name, [(run, run.curves[name]) for run in holders])
    chart = line_chart(f"{about.name} over training steps", title, series)
    return figure(title, chart, note="; ".join(notes) or None)


def _title(report: Report, name: str, curves: list[tuple[Run, Curve]]) -> str:
    """Say where the curve goes (one run) or which run ends where (several)."""
    if len(curves) == 1:
        start, end = ends(curves[0][1])
        whose = "" if len(report.runs) == 1 else f" ({curves[0][0].label})"
        if math.isnan(end):
            return f"{name}{whose}: no finite value"
        if len(curves[0][1].values) == 1 or start == end:
            return f"{name}{whose}: {number(end)}"
        change = abs(end - start) / max(abs(start), abs(end))
        verb = "hardly changes" if change < 0.01 else "falls" if end < start else "rises"
        return f"{name}{whose} {verb}: {number(start)} → {number(end)}"
    last = [(ends(curve)[1], run.label) for run, curve in curves]
    if len(last) == 2:
        return f"{name} ends at {number(last[1][0])} ({last[0][1]}: {number(last[0][0])})"
    finite = [end for end in last if not math.isnan(end[0])]
    if not finite:
        return f"{name}: no finite value"
    (least, low_run), (most, high_run) = min(finite), max(finite)
    if number(least) == number(most):
        return f"{name} ends at {number(least)} in all runs"
    return f"{name} ends between {number(least)} ({low_run}) and {number(most)} ({high_run})"


def _details(report: Report, names: list[str]) -> Markup:
    rows: list[list[object]] = []
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
    columns: list[object] = ["Logged value", "Run", "Points", "Start", "End", "Least", "Greatest"]
    grid = table("Curves in numbers", columns, rows)
    return tag("details", tag("summary", "Curves in numbers"), grid)


def _not_numbers(report: Report) -> Markup | None:
    """List what was logged but is no number, by its last value."""
    rows: list[list[object]] = []
    for run in report.runs:
        for name, value in run.last_values.items():
            text = str(value)
            rows.append([name, run.label, text if len(text) < 200 else f"{text[:200]}…"])
    if not rows:
        return None
    grid = table("Logged values that are not numbers", ["Logged value", "Run", "Last value"], rows)
    return tag("details", tag("summary", "Logged values that are not numbers"), grid)


CURVES = Section("curves", "Training", _render)
