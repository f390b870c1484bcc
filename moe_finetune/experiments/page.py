"""The study's page: the table, its pictures, the tests against the baseline, the runs."""

from __future__ import annotations

from pathlib import Path

from moe_finetune.experiments import render
from moe_finetune.experiments.figures import figures
from moe_finetune.experiments.results import StudyResults
from moe_finetune.experiments.table import Cell, Column, Table
from moe_finetune.io import write_atomic
from moe_finetune.report.context import Report, Section, group, table
from moe_finetune.report.markup import Markup, join, number, signed, tag
from moe_finetune.report.page import render_page

SIGNS = {"better": "▲ better", "worse": "▼ worse", "unclear": "● no clear difference"}


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
    columns += ["Mean rank", "Relative gain"]
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
            sign = tag("span", SIGNS[test.verdict], class_=f"verdict {test.verdict}")
            rows.append([
                ", ".join(filter(None, [g.name, row.label])), column.name,
                signed(factor * test.difference), interval, test.name,
                number(test.p, 2), number(test.p_holm, 2), sign,
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
