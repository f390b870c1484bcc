"""How long the rows are that a trainer gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datasets import Dataset


class RowLengths(NamedTuple):
    """The number of rows, and tokens of the longest and of all, within ``data.max_length``.

    A preference has the tokens of its longer answer with the prompt, and a prompt only its own.
    """

    rows: int
    longest: int
    tokens: int


class LengthsOfData(NamedTuple):
    """The lengths of training rows, and of validation rows if there are any."""

    train: RowLengths
    validation: RowLengths | None = None


def lengths_of_tokens(rows: Dataset, max_length: int) -> RowLengths:
    """The lengths of rows with ``input_ids``, from the offsets of their whole mapped file."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(rows.data.column("input_ids"))
    longest = min(pc.max(lengths).as_py() or 0, max_length)
    return RowLengths(len(rows), longest, pc.sum(lengths).as_py() or 0)
