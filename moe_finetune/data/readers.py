"""Read the sources of a recipe's data, each with its own columns and limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moe_finetune.data.rows import Former
from moe_finetune.data.sources import read_rows
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Placed, Row
from moe_finetune.recipe.data import DataSection, DataSource, Paths

T = TypeVar("T")
Rows = Iterator[tuple[int, str, Row]]
"""The number of a row's source, the row's location, and the row."""
DROP_REMEDY = "; data.malformed: drop drops and counts such rows"


def malformed_line(count: int, first: str) -> str:
    """The log's sentence about dropped malformed rows."""
    return f"{count} rows are malformed and were dropped; the first: {first}"


def listed(sources: Paths, name: str) -> list[DataSource]:
    """The sources of ``data.NAME`` as a list; a path becomes a source.

    Raises:
        DataError: there is none.
    """
    if not sources:
        raise DataError(f"data.{name} is an empty list; give a file, folder or hub dataset")
    entries = [sources] if isinstance(sources, str) else sources
    return [DataSource(path=source) if isinstance(source, str) else source for source in entries]


@dataclass
class SourceReader:
    """Reads one source of ``data``; iterate once. ``former.form`` is then the form of its rows.

    Attributes:
        drop_malformed: drop and count rows that cannot be used instead of raising.
        malformed: number of dropped rows; ``first_malformed``: the error of the first one.

    Raises:
        DataError: a row cannot be used (names its place), or there are no rows.
    """

    source: DataSource
    former: Former
    split: str
    seed: int = 0
    drop_malformed: bool = False
    malformed: int = 0
    first_malformed: str = ""

    @classmethod
    def of(cls, source: DataSource, data: DataSection, seed: int = 0) -> SourceReader:
        """The reader of a source, with the section's settings as defaults.

        ``seed`` decides which rows a source with a ``limit`` yields.
        """
        has_columns = bool(source.columns or source.template)
        former = Former(
            source.format or data.format,
            source.columns if has_columns else data.columns,
            source.template if has_columns else data.template,
        )
        drops = data.malformed == "drop"
        return cls(source, former, source.split or data.split, seed, drops)

    @property
    def unread(self) -> set[str]:
        """Columns of the rows so far that nothing reads."""
        return self.former.unread - {*self.source.where, *self.source.words}

    def __iter__(self) -> Iterator[Placed]:
        source = self.source
        rows = self._matching()
        if source.limit is not None:
            rows = draw(rows, source.limit, self.seed, f"{source.path} (data limit)")
        formed = 0
        for location, row in rows:
            try:
                usable = self.former(location, _worded(location, row, source.words))
            except DataError as error:
                if not self.drop_malformed:
                    remedy = DROP_REMEDY if formed else ""
                    raise DataError(f"{error}{remedy}") from error
                self.note_malformed(error)
                continue
            formed += 1
            yield location, usable
        if not formed and self.malformed:
            raise DataError(
                f"{source.path}: all {self.malformed} rows are malformed; the first: "
                f"{self.first_malformed}"
            )
        if not formed:
            raise DataError(f"{source.path} is empty; it needs at least one row")

    def note_malformed(self, error: DataError) -> None:
        """Count a dropped row."""
        self.malformed += 1
        self.first_malformed = self.first_malformed or str(error)

    def _matching(self) -> Iterator[Placed]:
        source, any_match = self.source, False
        for location, row in read_rows(source.path, self.split):
            if _wanted(location, row, source.where):
                any_match = True
                yield location, row
        if not any_match and source.where:
            raise DataError(
                f"{source.path} has no row whose "
                + " and ".join(
                    f"{name} is one of {values}" for name, values in source.where.items()
                )
            )


def rows_of(readers: Sequence[SourceReader], data: DataSection, name: str, seed: int) -> Rows:
    """The rows of all sources in order, or ``data.limit`` of them, drawn by the seed.

    Validation data may have fewer rows than the limit.

    Raises:
        DataError: a row cannot be used, or there are fewer training rows than the limit.
    """
    rows: Rows = (
        (index, location, row) for index, reader in enumerate(readers) for location, row in reader
    )
    if data.limit is None:
        return rows
    first = list(itertools.islice(rows, data.limit)) if name == "validation" else []
    if first and len(first) < data.limit:
        return iter(first)
    return draw(itertools.chain(first, rows), data.limit, seed, f"data.limit of data.{name}")


def draw(rows: Iterator[T], limit: int, seed: int, requested_by: str) -> Iterator[T]:
    """Yield ``limit`` of ``rows``, drawn uniformly by the seed, in their original order.

    One pass, with ``limit`` rows in memory (reservoir sampling).

    Raises:
        DataError: there are fewer than ``limit``; ``requested_by`` names the setting.
    """
    generator = np.random.default_rng([seed, limit])
    reservoir: list[tuple[int, T]] = []
    seen = 0
    for seen, row in enumerate(rows, 1):
        if seen <= limit:
            reservoir.append((seen, row))
        elif (slot := int(generator.integers(seen))) < limit:
            reservoir[slot] = (seen, row)
    if seen < limit:
        raise DataError(f"{requested_by}: is {limit}, but there are only {seen} rows; lower it")
    for _, row in sorted(reservoir, key=lambda item: item[0]):
        yield row


def _wanted(location: str, row: Row, where: dict[str, list[str | int]]) -> bool:
    return all(_field(location, row, name, "where") in values for name, values in where.items())


def _worded(location: str, row: Row, words: dict[str, list[str]]) -> Row:
    changed = dict(row)
    for name, names in words.items():
        label = _field(location, row, name, "words")
        if not isinstance(label, int) or not 0 <= label < len(names):
            raise DataError(
                f"{location}: '{name}': must be a number from 0 to {len(names) - 1} (data "
                f"words), not {label!r}"
            )
        changed[name] = names[label]
    return changed


def _field(location: str, row: Row, name: str, key: str) -> object:
    if name not in row:
        raise DataError(f"{location}: no field '{name}' (data {key}){did_you_mean(name, row)}")
    return row[name]
