"""A study's table as CSV (long), Markdown, and aligned text."""

from collections import Counter
from collections.abc import Callable

from moe_finetune.io.text_tables import aligned, csv_text, markdown
from moe_finetune.study.columns import Column
from moe_finetune.study.table import Cell, Group, Row, Table

MISSING = "–"


def to_csv(table: Table) -> str:
    """One line per cell, in the metric's unit."""
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


def heading(column: Column) -> str:
    """A column's name, with an arrow if lower is better."""
    return column.name if column.better == "higher" else f"{column.name} ↓"


def cell_text(column: Column, cell: Cell | None) -> str:
    """``34.16 ± 0.42``, shares in percent; ``*`` marks a difference that the test confirms."""
    if cell is None:
        return MISSING
    factor, digits = (100, 2) if column.percent else (1, 4)
    text = f"{factor * cell.mean:.{digits}f}"
    if cell.std is not None:
        text += f" ± {factor * cell.std:.{digits}f}"
    if cell.test is not None and cell.test.verdict in ("better", "worse"):
        text += "*"
    return text


def summary_heads(table: Table) -> list[str]:
    """Columns of the labels' summaries, which only benchmarks have."""
    return ["rank", "won", "gain"] if table.ranks else []


def summary_cells(table: Table, row: Row, group: Group) -> list[str]:
    """Rank, share won and gain of the row's label, in the first group; empty in the others."""
    if not table.ranks or group is not table.groups[0]:
        return [""] * len(summary_heads(table))
    rank, won, gain = (of.get(row.label) for of in (table.ranks, table.won, table.gains))
    return [
        f"{rank:.2f}" if rank is not None else MISSING,
        f"{100 * won:.1f} %" if won is not None else MISSING,
        f"{100 * gain:+.2f} %" if gain is not None else MISSING,
    ]


def text_rows(table: Table, best: Callable[[str], str]) -> list[list[str]]:
    """The table as rows of text, headings first; a group's name is a row of one cell."""
    rows = [["arm", *map(heading, table.columns), *summary_heads(table)]]
    for group in table.groups:
        if group.name:
            rows.append([f"{group.name}:"])
        for row in group.rows:
            texts = [
                best(text) if _best(row, column) else text
                for column in table.columns
                for text in [cell_text(column, row.cells.get(column.name))]
            ]
            rows.append([row.label, *texts, *summary_cells(table, row, group)])
    return rows


TESTS = ("arm", "benchmark or metric", "items", "baseline", "value", "difference",
         "95 % interval", "test", "p", "p (Holm)", "verdict")  # fmt: skip


def test_rows(table: Table) -> list[list[str]]:
    """Every test against the baseline; shares in percent and percentage points."""
    rows = []
    for (group, row), column, cell, test in table.tests:
        factor, digits = (100, 2) if column.percent else (1, 4)
        interval = MISSING
        if test.low is not None and test.high is not None:
            low, high = (f"{factor * end:+.{digits}f}" for end in (test.low, test.high))
            interval = f"[{low}, {high}]"
        value, baseline = (factor * end for end in (cell.mean, cell.mean - test.difference))
        rows.append([
            ", ".join(filter(None, [group.name, row.label])), heading(column),
            "" if column.items is None else str(column.items), f"{baseline:.{digits}f}",
            f"{value:.{digits}f}", f"{factor * test.difference:+.{digits}f}", interval, test.name,
            *("" if p is None else f"{p:.2g}" for p in (test.p, test.p_holm)), test.verdict,
        ])  # fmt: skip
    return rows


def counts(table: Table) -> list[str]:
    """How many tests of each arm come out how, and its gain."""
    verdicts: dict[str, Counter[str]] = {}
    for (_, row), _, _, test in table.tests:
        verdicts.setdefault(row.label, Counter())[test.verdict] += 1
    lines = []
    for label, count in verdicts.items():
        gain = table.gains.get(label)
        text = "not defined (a score of 0)" if gain is None else f"{gain:+.2%}"
        lines.append(
            f"{label}: {count['better']} better, {count['unclear'] + count['unknown']} without a "
            f"clear difference, {count['worse']} worse; relative gain {text}"
        )
    return lines


def comparison_text(table: Table) -> str:
    """The tests, how many come out how, and the notes."""
    words = {"unclear": "no clear difference", "unknown": "no interval"}
    rows = [[*row[:-1], words.get(row[-1], row[-1])] for row in test_rows(table)]
    lines = [aligned([list(TESTS), *rows], "left"), "", *counts(table), *table.notes]
    return "\n".join(lines) + "\n"


def to_text(table: Table) -> str:
    """Aligned columns, and the notes."""
    text = aligned(text_rows(table, lambda text: f"{text} (best)"), "left")
    return "\n".join([table.title, text, "", *explanation(table), *table.notes]) + "\n"


def to_markdown(table: Table) -> str:
    """A pipe table under its title, best in bold, and the notes."""
    head, *rows = text_rows(table, lambda text: f"**{text}**")
    full = [row + [""] * (len(head) - len(row)) for row in rows]
    notes = " ".join([*explanation(table), *table.notes])
    return f"## {table.title}\n{notes}\n\n{markdown([head, *full])}"


def _best(row: Row, column: Column) -> bool:
    cell = row.cells.get(column.name)
    return cell is not None and cell.best


def explanation(table: Table) -> list[str]:
    """Sentences that explain the numbers."""
    count = len(table.seeds)
    spread = f"Mean ± standard deviation over {count} seeds."
    sentences = [spread if count > 1 else "One seed, so no spread."]
    if table.ranks:
        sentences.append(
            "Rank: mean over the benchmarks that all arms have, 1 is best. Won: share of these "
            "that the arm is best in; arms that tie share one."
        )
    if table.ranks and table.baseline is not None:
        sentences.append(
            f"Gain: mean of value / {table.baseline} - 1 over these cells; inverted where lower is "
            "better."
        )
    if table.baseline is not None:
        over = "seeds" if not table.ranks else "seeds and items" if count > 1 else "items"
        sentences.append(
            f"*: differs from {table.baseline}, paired over {over}, p < 0.05 after Holm's "
            "correction over the table."
        )
    return sentences
