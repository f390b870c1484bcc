"""The study's page: the table, its pictures, the tests against the baseline, the runs.

The pictures show what every arm reached side by side, and its curves over training.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from moe_finetune.experiments import render
from moe_finetune.experiments.results import AVERAGE, StudyResults
from moe_finetune.experiments.table import Cell, Column, Group, Table, place_of
from moe_finetune.io import write_atomic
from moe_finetune.metrics.words import word
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.intervals import Dot, dot_plot
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.compare import verdict_mark
from moe_finetune.report.context import Report, Section, figure, group, swatch, table
from moe_finetune.report.markup import Markup, join, number, signed, tag
from moe_finetune.report.page import render_page


def write_page(results: StudyResults, found: Table, path: Path) -> Path:
    """Write the page into the file ``path`` and return it."""
    sections = [
        Section("table", "Results", lambda _: _table(found)),
        Section("figures", "Pictures", lambda _: figures(results, found)),
        Section("tests", "Against the baseline", lambda _: _tests(found)),
        Section("runs", "Runs", lambda _: _runs(results)),
    ]
    write_atomic(path, render_page(Report([], found.title), sections))
    return path


def _table(found: Table) -> Markup:
    columns: list[object] = ["Arm", *map(render.heading, found.columns)]
    columns += ["Mean rank", "Won", "Relative gain"]
    parts = []
    for g in found.groups:
        rows = []
        for row in g.rows:
            cells: list[object] = [row.label]
            cells += [_cell(c, row.cells.get(c.name)) for c in found.columns]
            cells += render.summary_cells(found, row, g is not found.groups[0])
            rows.append(cells)
        shown = table(g.name or found.title, columns, rows)
        parts.append(group(g.name, shown) if g.name else shown)
    notes = [tag("li", note) for note in found.notes]
    source = [found.source] if found.source else []
    return join([
        tag("p", " ".join([*source, *render.explanation(found)]), class_="intro"),
        *parts,
        tag("ul", notes, class_="missing") if notes else None,
    ])  # fmt: skip


def _cell(column: Column, cell: Cell | None) -> object:
    text = render.shown(column, cell)
    return tag("strong", text) if cell is not None and cell.best else text


def _tests(found: Table) -> Markup | None:
    rows: list[list[object]] = []
    for g, row in found.rows:
        for column in found.columns:
            cell = row.cells.get(column.name)
            if cell is None or cell.test is None:
                continue
            test, factor = cell.test, 100.0 if column.percent else 1.0
            interval = render.MISSING
            if test.low is not None and test.high is not None:
                interval = f"[{signed(factor * test.low)}, {signed(factor * test.high)}]"
            rows.append([
                ", ".join(filter(None, [g.name, row.label])), column.name,
                signed(factor * test.difference), interval, test.name,
                number(test.p, 2), number(test.p_holm, 2), verdict_mark(test.verdict),
            ])  # fmt: skip
    if not rows:
        return None
    columns: list[object] = [
        "Arm", "Benchmark or metric", f"Difference from {found.baseline}", "95 % interval", "Test",
        "p", "p (Holm)", "Verdict",
    ]  # fmt: skip
    note = (
        "Shares in percentage points. Items and seeds are paired; with several seeds both are "
        "resampled. Holm's correction covers all benchmarks together, and all metrics together."
    )
    return join([table("Every test", columns, rows), tag("p", note, class_="note")])


def _runs(results: StudyResults) -> Markup:
    rows: list[list[object]] = [
        [run.arm, str(run.seed), run.state, run.reason, str(run.folder.relative_to(results.folder))]
        for run in results.runs
    ]
    return table("Every run", ["Arm", "Seed", "State", "Reason", "Folder"], rows)


POINTS = 3  # fewer are no curve
BASELINE = "var(--run-0)"


def figures(results: StudyResults, found: Table) -> Markup | None:
    """The pictures of every group of arms, in the arms' colours; None without a finished run."""
    colors = _colors(found)
    parts = []
    for g in found.groups:
        shown = [
            *(_benchmarks(g, found, colors) or []),
            *(_metric(g, column, colors) for column in found.columns if not column.benchmark),
            *(_curve(g, column, results, colors) for column in found.columns),
        ]
        drawn = [picture for picture in shown if picture is not None]
        if drawn:
            grid = tag("div", drawn, class_="grid")
            parts.append(group(g.name, grid) if g.name else grid)
    if not parts:
        return None
    key = tag("ul", [tag("li", swatch(label, c)) for label, c in colors.items()], class_="key")
    note = "Dots are means over seeds, with one sample standard deviation to both sides."
    return join([tag("p", note, class_="intro"), key, *parts])


def _colors(found: Table) -> dict[str, str]:
    others = [label for label in found.labels if label != found.baseline]
    known = {label: nth_color(place) for place, label in enumerate(others)}
    return {label: known.get(label, BASELINE) for label in found.labels}


def _benchmarks(g: Group, found: Table, colors: dict[str, str]) -> list[Markup] | None:
    columns = [c for c in found.columns if c.benchmark and any(c.name in r.cells for r in g.rows)]
    if not columns:
        return None
    percent = all(column.percent for column in columns)
    rows = [
        (
            column.name,
            [_dot(r.label, r.cells[column.name], colors) for r in g.rows if column.name in r.cells],
            math.nan,
        )
        for column in columns
    ]
    chart = dot_plot(
        "Benchmarks by arm",
        "A row for each benchmark, a dot for each arm.",
        rows,
        x_label="score, %" if percent else "score",
        scale=100.0 if percent else 1.0,
    )
    return [figure("Benchmarks", chart, wide=True)]


def _metric(g: Group, column: Column, colors: dict[str, str]) -> Markup | None:
    held = [(row.label, row.cells[column.name]) for row in g.rows if column.name in row.cells]
    if not held:
        return None
    about = word(column.name)
    rows = [(label, [_dot(label, cell, colors)], math.nan) for label, cell in held]
    chart = dot_plot(f"{about.name} by arm", f"{column.better} is better", rows, x_label=about.name)
    return figure(f"{about.name} ({column.better} is better)", chart, note=about.meaning or None)


def _dot(label: str, cell: Cell, colors: dict[str, str]) -> Dot:
    spread = math.nan if cell.std is None else cell.std
    text = f"{label}: {number(cell.mean)}"
    text += "" if cell.std is None else f" ± {number(cell.std)}"
    return Dot(cell.mean, cell.mean - spread, cell.mean + spread, colors[label], text)


def _curve(
    g: Group, column: Column, results: StudyResults, colors: dict[str, str]
) -> Markup | None:
    """A column over training, an arm a line: the mean of its runs where all of them have it."""
    if column.name == AVERAGE and (results.together or results.benchmarks is not None):
        return None  # a run's own benchmarks are not those of the column
    series = []
    for row in g.rows:
        runs = [r for r in results.finished if place_of(results, r.values) == (g.name, row.label)]
        curves = [r.scores(column.name) if column.benchmark else r.curve(column.name) for r in runs]
        if column.benchmark:  # of the runs that share a row, one has it
            curves = [curve for curve in curves if curve]
        curve = mean_curve(curves)
        if len(curve) >= POINTS:
            kind = "baseline" if row.baseline else ""
            steps = [float(step) for step in curve]
            values = [value * (100 if column.percent else 1) for value in curve.values()]
            series.append(Series(row.label, colors[row.label], steps, values, kind))
    if not series:
        return None
    shown = column.name if column.benchmark else word(column.name).name
    name = f"{shown}{', %,' if column.percent else ''} over training steps"
    chart = line_chart(name, "The mean of each arm's runs.", series)
    return figure(name, chart)


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """Mean of curves, by step, at the steps that all of them have."""
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {step: float(np.mean([curve[step] for curve in curves])) for step in sorted(shared)}
