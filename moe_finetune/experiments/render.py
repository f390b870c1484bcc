"""A study's table as CSV (long), LaTeX (as in the papers), JSON, and text for a terminal."""

from __future__ import annotations

import csv
import io

from moe_finetune.experiments.table import Cell, Column, Row, Table
from moe_finetune.io.hashes import to_json

MISSING = "–"
_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}


def to_csv(table: Table) -> str:
    """One line a cell, in the metric's own unit."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    axes = list(table.groups[0].values) if table.groups else []
    writer.writerow([
        *axes, "label", "column", "metric", "better", "seeds", "mean", "std", "best", "rank",
        "difference", "low", "high", "test", "p", "p_holm", "verdict",
    ])  # fmt: skip
    for group, row in table.rows:
        for column in table.columns:
            cell = row.cells.get(column.name)
            if cell is None:
                continue
            t = cell.test
            tested = [t.difference, t.low, t.high, t.name, t.p, t.p_holm, t.verdict] if t else []
            writer.writerow([
                *group.values.values(), row.label, column.name, column.metric,
                column.better, len(cell.values), cell.mean, cell.std, int(cell.best), cell.rank,
                *tested, *[""] * (7 - len(tested)),
            ])  # fmt: skip
    return stream.getvalue()


def to_json_text(table: Table) -> str:
    """Everything."""
    return to_json(table.to_mapping(), 1, sort=False) + "\n"


def heading(column: Column) -> str:
    """A column's name with an arrow where less is better."""
    return column.name if column.better == "higher" else f"{column.name} ↓"


def shown(column: Column, cell: Cell | None) -> str:
    """``34.16 ± 0.42``, shares in percent; ``*`` marks a difference that the test holds up."""
    if cell is None:
        return MISSING
    factor, digits = (100, 2) if column.percent else (1, 4)
    text = f"{factor * cell.mean:.{digits}f}"
    if cell.std is not None:
        text += f" ± {factor * cell.std:.{digits}f}"
    if cell.test is not None and cell.test.verdict != "unclear":
        text += "*"
    return text


def summary_cells(table: Table, row: Row, grouped: bool) -> list[str]:
    """Mean rank and relative gain, which are of the label and stand where it first appears."""
    if grouped:
        return ["", ""]
    rank, gain = table.ranks.get(row.label), table.gains.get(row.label)
    return [
        f"{rank:.2f}" if rank is not None else MISSING,
        f"{100 * gain:+.2f} %" if gain is not None else MISSING,
    ]


def to_text(table: Table) -> str:
    """Aligned columns, and the notes."""
    header = ["arm", *map(heading, table.columns), "rank", "gain"]
    lines: list[list[str]] = []
    for group in table.groups:
        if group.name:
            lines.append([f"{group.name}:"])
        for row in group.rows:
            cells = [
                shown(c, row.cells.get(c.name)) + (" (best)" if _best(row, c) else "")
                for c in table.columns
            ]
            later = group is not table.groups[0]
            lines.append([row.label, *cells, *summary_cells(table, row, later)])
    widths = [
        max((len(line[i]) for line in [header, *lines] if len(line) > 1), default=0)
        for i in range(len(header))
    ]
    out = [
        "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=False)).rstrip()
        for line in [header, *lines]
    ]
    return "\n".join([table.title, *out, "", *explanation(table), *table.notes]) + "\n"


def to_latex(table: Table) -> str:
    """A ``tabular`` with booktabs rules, best in bold, and its caption."""
    columns = [_escape(heading(c)).replace("↓", r"$\downarrow$") for c in table.columns]
    header = ["", *columns, "Rank", "Gain"]
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        rf"\caption{{{_escape(table.title)}. {_escape(' '.join(explanation(table)))}}}",
        rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}",
        r"\toprule",
        " & ".join(header) + r" \\",
    ]
    for group in table.groups:
        lines.append(r"\midrule")
        if group.name:
            lines.append(
                rf"\multicolumn{{{len(header)}}}{{c}}{{\textit{{{_escape(group.name)}}}}} \\"
            )
        for row in group.rows:
            cells = [_latex_cell(row, column) for column in table.columns]
            summary = summary_cells(table, row, group is not table.groups[0])
            cells += [_escape(text).replace("–", "--") for text in summary]
            lines.append(" & ".join([_escape(row.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_cell(row: Row, column: Column) -> str:
    text = shown(column, row.cells.get(column.name)).replace("–", "--")
    mean, _, spread = text.partition(" ± ")
    star = text.endswith("*")
    mean, spread = mean.rstrip("*"), spread.rstrip("*")
    if _best(row, column):
        mean = rf"\textbf{{{mean}}}"
    return mean + (rf" $\pm$ {spread}" if spread else "") + ("$^{*}$" if star else "")


def _best(row: Row, column: Column) -> bool:
    cell = row.cells.get(column.name)
    return cell is not None and cell.best


def explanation(table: Table) -> list[str]:
    """What the numbers are, in sentences."""
    count = len(table.seeds)
    said = [
        f"Mean ± standard deviation over {count} seeds."
        if count > 1
        else "One seed, so no spread.",
        "Rank: mean over the benchmarks that all arms have, 1 is best.",
    ]
    if table.baseline is not None:
        over = "seeds and items" if count > 1 else "items"
        said += [
            f"Gain: mean of value / {table.baseline} - 1 over these cells.",
            f"*: differs from {table.baseline}, paired over {over}, p < 0.05 after Holm's "
            "correction over the table.",
        ]
    return said


def _escape(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
