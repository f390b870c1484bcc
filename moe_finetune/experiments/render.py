"""A study's table as CSV (long), LaTeX (as in the papers), JSON, and text for a terminal."""

from __future__ import annotations

from moe_finetune.experiments.table import Cell, Column, Row, Table
from moe_finetune.io.hashes import to_json
from moe_finetune.io.tables import aligned, csv_text

MISSING = "–"
_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}


def to_csv(table: Table) -> str:
    """One line a cell, in the metric's own unit."""
    tested = ("difference", "low", "high", "name", "p", "p_holm", "verdict")
    return csv_text([
        {
            **group.values, "label": row.label, "column": column.name, "metric": column.metric,
            "better": column.better, "seeds": len(cell.values), "mean": cell.mean,
            "std": cell.std, "best": int(cell.best), "rank": cell.rank,
            **{"test" if key == "name" else key: getattr(cell.test, key, None) for key in tested},
        }
        for group, row in table.rows
        for column in table.columns
        if (cell := row.cells.get(column.name)) is not None
    ])  # fmt: skip


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
    if cell.test is not None and cell.test.verdict in ("better", "worse"):
        text += "*"
    return text


def summary_cells(table: Table, row: Row, grouped: bool) -> list[str]:
    """Rank, share won and gain, which are of the label and stand where it first appears."""
    if grouped:
        return ["", "", ""]
    rank, won, gain = (of.get(row.label) for of in (table.ranks, table.won, table.gains))
    return [
        f"{rank:.2f}" if rank is not None else MISSING,
        f"{100 * won:.1f} %" if won is not None else MISSING,
        f"{100 * gain:+.2f} %" if gain is not None else MISSING,
    ]


def to_text(table: Table) -> str:
    """Aligned columns, and the notes."""
    header = ["arm", *map(heading, table.columns), "rank", "won", "gain"]
    lines = [header]
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
    text = aligned(lines, "left")
    return "\n".join([table.title, text, "", *explanation(table), *table.notes]) + "\n"


def to_latex(table: Table) -> str:
    """A ``tabular`` with booktabs rules, best in bold, and its caption."""
    columns = [_escape(heading(c)).replace("↓", r"$\downarrow$") for c in table.columns]
    header = ["", *columns, "Rank", "Won", "Gain"]
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
        "Rank: mean over the benchmarks that all arms have, 1 is best. Won: share of these that "
        "the arm is best in; arms that tie share one.",
    ]
    if table.baseline is not None:
        over = "seeds and items" if count > 1 else "items"
        said += [
            f"Gain: mean of value / {table.baseline} - 1 over these cells; inverted where lower is "
            "better.",
            f"*: differs from {table.baseline}, paired over {over}, p < 0.05 after Holm's "
            "correction over the table.",
        ]
    return said


def _escape(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
