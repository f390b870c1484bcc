"""The page of ``moe-finetune compare``: scores against the first run's, task by task."""

from __future__ import annotations

from moe_finetune.evaluation.comparison import Comparison
from moe_finetune.report.compare import verdict_mark
from moe_finetune.report.context import Report, Section, table
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.page import render_page


def comparison_page(comparison: Comparison) -> str:
    """Return one HTML page that opens without a network."""
    section = Section("scores", "Scores", lambda _: _scores(comparison))
    return render_page(Report([], f"Comparison with {comparison.baseline}"), [section])


def _scores(comparison: Comparison) -> Markup:
    header, *lines = comparison.table()
    rows: list[list[object]] = [[*line[:-1], verdict_mark(line[-1])] for line in lines]
    return join([
        table("Every task", [*header], rows, sortable=True),
        tag("ul", [tag("li", sentence) for sentence in comparison.summary()]),
    ])  # fmt: skip
