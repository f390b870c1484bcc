"""How long the rows are that a trainer gets."""

from typing import NamedTuple


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
