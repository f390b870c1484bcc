"""Large tables of cases: what ``test-quick`` and ``test`` run, and the rest for a release."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.support import tiny


def table(
    rows: Iterable[str],
    columns: Iterable[str],
    *,
    every: int,
    whole_rows: Collection[str] = (),
    whole_columns: Collection[str] = (),
) -> list[Any]:
    """Parameters (row, column) of all pairs; the marker ``release`` is on those left for later.

    Without the marker are the whole rows and columns, and of the other pairs one in ``every`` along
    diagonals, so that each row and each column is among them where it has ``every`` or more pairs.
    """
    cases = []
    columns = list(columns)
    for place, row in enumerate(rows):
        for across, column in enumerate(columns):
            whole = row in whole_rows or column in whole_columns
            first = whole or (place + across) % every == 0
            cases.append(pytest.param(row, column, marks=() if first else pytest.mark.release))
    return cases


def with_more(first: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Cases of one test: ``make test-quick`` leaves out those in ``more``, by their marker."""
    return [*first, *(_marked(case) for case in more)]


def _marked(case: Any) -> Any:
    values = getattr(case, "values", case if isinstance(case, tuple) else (case,))
    return pytest.param(*values, marks=[*getattr(case, "marks", ()), pytest.mark.more])


FIRST = ("deepseek_v3",)
"""Sigmoid with groups and a bias, a dense layer, shared experts: most parts in one family."""
TINY_FAMILIES = with_more(FIRST, (name for name in tiny.FAMILY_NAMES if name not in FIRST))
