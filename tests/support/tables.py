"""Large tables of cases: the part that ``make test`` runs, and the rest for a release."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
