"""The study's page: the table, its pictures, the tests against the baseline, the runs.

The pictures show the arms' results side by side, and their curves over training.
"""

import math
from pathlib import Path

from moe_finetune.io import write_atomic
from moe_finetune.metrics.words import word
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.intervals import Dot, dot_plot
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.context import Report, Section, figure, group, swatch, table
from moe_finetune.report.markup import Markup, join, number, tag
from moe_finetune.report.page import render_page
from moe_finetune.report.score_differences import verdict_mark
from moe_finetune.study import render
from moe_finetune.study.columns import Column
from moe_finetune.study.read_study import AVERAGE, StudyResults, mean_curve
from moe_finetune.study.table import Cell, Group, Table, group_and_row

POINTS = 3  # fewer points are not a curve
BASELINE = "var(--run-0)"


def write_page(results: StudyResults, study_table: Table, path: Path) -> Path:
    """Write the page into the file ``path`` and return it."""
    sections = [
        *study_sections(results, study_table),
        Section("runs", "Runs", lambda _: _runs(results)),
    ]
    write_atomic(path, render_page(Report([], study_table.title), sections))
    return path


def comparison_page(results: StudyResults, study_table: Table) -> str:
    """The page of ``moe-finetune compare``."""
    return render_page(Report([], study_table.title), study_sections(results, study_table))


def study_sections(results: StudyResults, study_table: Table) -> list[Section]:
    """The table, its pictures and its tests."""
    return [
        Section("table", "Results", lambda _: table_markup(study_table)),
        Section("figures", "Pictures", lambda _: figures(results, study_table)),
        Section("tests", "Against the baseline", lambda _: _tests(study_table)),
    ]


def table_markup(study_table: Table) -> Markup:
    """A grid for each group of arms, below an explanation of the numbers and what is missing."""
    columns: list[object] = ["Arm", *map(render.heading, study_table.columns)]
    columns += [head.title() for head in render.summary_heads(study_table)]
    parts = []
    for arms in study_table.groups:
        rows = []
        for row in arms.rows:
            cells: list[object] = [row.label]
            cells += [_cell(column, row.cells.get(column.name)) for column in study_table.columns]
            cells += render.summary_cells(study_table, row, arms)
            rows.append(cells)
        grid = table(arms.name or study_table.title, columns, rows)
        parts.append(group(arms.name, grid) if arms.name else grid)
    notes = [tag("li", note) for note in study_table.notes]
    source = [study_table.source] if study_table.source else []
    return join([
        tag("p", " ".join([*source, *render.explanation(study_table)]), class_="intro"),
        *parts,
        tag("ul", notes, class_="missing") if notes else None,
    ])  # fmt: skip


def _cell(column: Column, cell: Cell | None) -> object:
    text = render.cell_text(column, cell)
    return tag("strong", text) if cell is not None and cell.best else text


def _tests(study_table: Table) -> Markup | None:
    lines = render.test_rows(study_table)
    if not lines:
        return None
    rows: list[list[object]] = [[*line[:-1], verdict_mark(line[-1])] for line in lines]
    heads: list[object] = [head[0].upper() + head[1:] for head in render.TESTS]
    note = (
        "Shares in percentage points. Items and seeds are paired; with several seeds both are "
        "resampled. Holm's correction covers the whole table."
    )
    summary = tag("ul", [tag("li", line) for line in render.counts(study_table)])
    grid = table("Every test", heads, rows, sortable=True)
    return join([grid, summary, tag("p", note, class_="note")])


def _runs(results: StudyResults) -> Markup:
    rows: list[list[object]] = [
        [run.arm, str(run.seed), run.state, run.reason, str(run.folder.relative_to(results.folder))]
        for run in results.runs
    ]
    return table("Every run", ["Arm", "Seed", "State", "Reason", "Folder"], rows)


def figures(results: StudyResults, study_table: Table) -> Markup | None:
    """The pictures of every group of arms, in the arms' colors; None without a finished run."""
    colors = _colors(study_table)
    parts = []
    for arms in study_table.groups:
        candidates = [
            _benchmarks(arms, study_table, colors),
            *(_metric(arms, column, colors) for column in study_table.columns),
            *(_curves(arms, column, results, colors) for column in study_table.columns),
        ]
        pictures = [picture for picture in candidates if picture is not None]
        if pictures:
            grid = tag("div", pictures, class_="grid")
            parts.append(group(arms.name, grid) if arms.name else grid)
    if not parts:
        return None
    key = tag("ul", [tag("li", swatch(label, c)) for label, c in colors.items()], class_="key")
    note = "Dots are means over seeds, with one sample standard deviation to both sides."
    return join([tag("p", note, class_="intro"), key, *parts])


def _colors(study_table: Table) -> dict[str, str]:
    labels = list(dict.fromkeys(row.label for _, row in study_table.rows))
    others = [label for label in labels if label != study_table.baseline]
    colors = {label: nth_color(index) for index, label in enumerate(others)}
    return {label: colors.get(label, BASELINE) for label in labels}


def _benchmarks(arms: Group, study_table: Table, colors: dict[str, str]) -> Markup | None:
    columns = [
        column
        for column in study_table.columns
        if column.benchmark and any(column.name in row.cells for row in arms.rows)
    ]
    if not columns:
        return None
    percent = all(column.percent for column in columns)
    rows = [
        (
            column.name,
            [
                _dot(row.label, row.cells[column.name], colors)
                for row in arms.rows
                if column.name in row.cells
            ],
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
    return figure("Benchmarks", chart, wide=True)


def _metric(arms: Group, column: Column, colors: dict[str, str]) -> Markup | None:
    cells = {row.label: row.cells[column.name] for row in arms.rows if column.name in row.cells}
    if column.benchmark or not cells:
        return None
    about = word(column.name)
    rows = [(label, [_dot(label, cell, colors)], math.nan) for label, cell in cells.items()]
    chart = dot_plot(f"{about.name} by arm", f"{column.better} is better", rows, x_label=about.name)
    return figure(f"{about.name} ({column.better} is better)", chart, note=about.meaning or None)


def _dot(label: str, cell: Cell, colors: dict[str, str]) -> Dot:
    spread = math.nan if cell.std is None else cell.std
    text = f"{label}: {number(cell.mean)}"
    text += "" if cell.std is None else f" ± {number(cell.std)}"
    return Dot(cell.mean, cell.mean - spread, cell.mean + spread, colors[label], text)


def _curves(
    arms: Group, column: Column, results: StudyResults, colors: dict[str, str]
) -> Markup | None:
    """A column over training, one line per arm: the mean of its runs at steps that all have."""
    if column.name == AVERAGE and (results.together or results.benchmarks is not None):
        return None  # a run's benchmarks may differ from the column's
    series = []
    for row in arms.rows:
        runs = [
            run
            for run in results.finished
            if group_and_row(results, run.values) == (arms.name, row.label)
        ]
        curves = [
            run.curve(f"scores/{column.name}" if column.benchmark else column.name) for run in runs
        ]
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
    column_name = column.name if column.benchmark else word(column.name).name
    title = f"{column_name}{', %,' if column.percent else ''} over training steps"
    return figure(title, line_chart(title, "The mean of each arm's runs.", series))
