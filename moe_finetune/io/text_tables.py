"""Rows of text as a table: aligned for a terminal, with pipes for Markdown, and as CSV."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal


def aligned(rows: Sequence[Sequence[str]], numbers: Literal["left", "right"] = "right") -> str:
    """Align rows in columns, two spaces apart; a row of one cell ignores the columns.

    Headings come first; ``numbers`` aligns the cells after the first column.
    """
    widths = [
        max(map(len, column)) for column in zip(*(r for r in rows if len(r) > 1), strict=True)
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index and numbers == "right" else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        if len(row) > 1
        else row[0]
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; the first row contains the headings."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the first row's keys are the headings, None is an empty cell."""
    import pandas

    return pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
