"""Sources of training data: files, folders, hub datasets; their columns, filters and limits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moe_finetune.data.chat import TemplateLimitError
from moe_finetune.data.held_out import held_out_of
from moe_finetune.data.row_forms import Former
from moe_finetune.errors import DataError, did_you_mean, reason_of
from moe_finetune.io.counted import counted, in_number
from moe_finetune.io.hashes import sha256_file, sha256_json
from moe_finetune.io.hub import check_hub, commit_of, opened_commit
from moe_finetune.io.json_file import read_object
from moe_finetune.io.row_files import Placed, Row, kind_of, placed_rows, without_nulls
from moe_finetune.io.split_files import data_files, local_files
from moe_finetune.recipe.data import DataSection, DataSource, Paths

T = TypeVar("T")
Rows = Iterator[tuple[int, str, Any]]
"""The number of a row's source, the row's location, and the row."""
_HASHED_ROWS = 1024
DROP_REMEDY = "; data.malformed: drop drops and counts such rows"


def listed(sources: Paths, name: str) -> list[DataSource]:
    """The sources of ``data.NAME`` as a list; a path becomes a source."""
    if not sources:
        raise DataError(f"data.{name} is an empty list; give a file, folder or hub dataset")
    entries = [sources] if isinstance(sources, str) else sources
    return [DataSource(path=source) if isinstance(source, str) else source for source in entries]


def read_rows(source: str, split: str = "train") -> Iterator[Placed]:
    """Yield ``(location, row)`` of a file, a folder of files, a saved dataset, or a hub dataset.

    The location is ``file:line`` for JSONL and CSV and ``file: row N`` (from 1) otherwise. A hub id
    may name a configuration: ``openai/gsm8k:main``. A ``.txt`` file is one row of ``text``. Of a
    folder, the files of ``split`` are read, see :mod:`moe_finetune.io.split_files`.
    """
    files = local_files(source, split)
    if files is None:
        for index, row in enumerate(_dataset(source, split), 1):
            yield f"{source}: row {index}", without_nulls(row)
    for file in files or ():
        yield from placed_rows(file, finite=False)  # what a row is made of is checked there


def source_identity(source: str, split: str = "train") -> list[Any]:
    """Plain values that identify a source's content: equal if :func:`read_rows` yields equal rows.

    Files are identified by content, so a copy is the same source and a changed file is not; a hub
    dataset by its fingerprint.
    """
    files, folder = local_files(source, split), Path(source).expanduser()
    if files is not None:
        return [[kind_of(file), sha256_file(file)] for file in files]
    if folder.is_dir():
        return [split, *([path.name, sha256_file(path)] for path in _saved_files(folder, split))]
    return [source, split, _dataset(source, split)._fingerprint]


def content_hash(source: str, split: str = "train") -> str:
    """A hash of a source's content; unlike :func:`source_identity`, equal for another download."""
    files, folder = local_files(source, split), Path(source).expanduser()
    if files is not None or folder.is_dir():
        return sha256_json(source_identity(source, split))
    rows, over = _dataset(source, split), hashlib.sha256()
    table = rows.data.table
    for first in range(0, len(table), _HASHED_ROWS):
        for batch in table.slice(first, _HASHED_ROWS).combine_chunks().to_batches():
            over.update(batch.serialize())
    return over.hexdigest()


def files_line(source: str, split: str) -> str | None:
    """Which files of a folder are read, and which are not; None for any other source."""
    folder, chosen = Path(source).expanduser(), local_files(source, split)
    if chosen is None or not folder.is_dir():
        return None
    others = [path for path in data_files(folder) if path not in chosen]
    others += [path for path in sorted(folder.iterdir()) if kind_of(path) == ".txt"]
    names = dict.fromkeys(path.name for path in others if path not in chosen)
    skipped = f" (not read: {', '.join(names)})" if names else ""
    return f"{source}: {', '.join(path.name for path in chosen)}{skipped}"


def _saved_files(folder: Path, split: str) -> list[Path]:
    """The files of a saved data set: those that its state names, not what programs cache there."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / split).is_dir():
            _dataset(str(folder), split)  # names the splits
        folder = folder / split
    state = folder / "state.json"
    named = read_object(state, DataError, "save the data set again").get("_data_files")
    if not isinstance(named, list) or not all(isinstance(file, dict) for file in named):
        raise DataError(f"{state}: names no files (_data_files); save the data set again")
    return [state, *(folder / str(file.get("filename")) for file in named)]


def _dataset(source: str, split: str) -> Any:
    from datasets import load_dataset, load_from_disk

    folder = Path(source).expanduser()
    if folder.is_dir():
        saved: Any = load_from_disk(str(folder))
        if not isinstance(saved, Mapping):
            return saved
        if split not in saved:
            raise DataError(f"{folder} has no split '{split}'{did_you_mean(split, saved)}")
        return saved[split]
    check_hub()
    name, _, configuration = source.partition(":")
    try:
        commit = commit_of(f"datasets/{name}")
        rows: Any = load_dataset(name, configuration or None, split=split, revision=commit)
        for file in rows.cache_files[:1]:  # NAME/CONFIGURATION/VERSION/COMMIT/*.arrow
            opened_commit(f"datasets/{name}", None, Path(file["filename"]).parent.name)
        return rows
    except Exception as error:  # the libraries raise a dozen unrelated types here
        raise DataError(
            f"'{source}' is not a file or folder (relative to {Path.cwd()}), and it cannot be "
            f"loaded as a hub dataset: {reason_of(error)}"
        ) from error


class SourceReader:
    """Reads one source of ``data``, with the section's settings as defaults; iterate once.

    ``seed`` decides which rows a ``limit`` yields. ``former`` is called with a location and a row,
    and notes in its ``unread`` the columns that it does not read. Dropped rows are counted.
    """

    def __init__(self, source: DataSource, data: DataSection, seed: int = 0, former: Any = None):
        settings = source if source.columns or source.template else data
        self.source, self.seed = source, seed
        form = source.format or data.format
        self.former: Any = former or Former(form, settings.columns, settings.template)
        self.split = source.split or data.split
        self.drops = data.malformed == "drop"
        self.malformed, self.first_malformed = 0, ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        source, formed = self.source, 0
        rows = self._matching()
        if source.limit is not None:
            rows = draw(rows, source.limit, self.seed, f"{source.path} (data limit)")
        for location, row in rows:
            try:
                usable = self.former(location, _worded(location, row, source.words))
            except DataError as error:
                if self.drops and not isinstance(error, TemplateLimitError):
                    self.malformed += 1
                    self.first_malformed = self.first_malformed or str(error)
                    continue
                raise DataError(f"{error}{DROP_REMEDY if formed else ''}") from error
            formed += 1
            yield location, usable
        if not formed and self.malformed:
            raise DataError(
                f"{source.path}: every row is malformed ({self.malformed:,}); the first: "
                f"{self.first_malformed}"
            )
        if not formed:
            raise DataError(f"{source.path} is empty; it needs at least one row")

    @property
    def unread(self) -> set[str]:
        """Columns with values that nothing has read so far."""
        return set(self.former.unread) - {*self.source.where, *self.source.words}

    def _matching(self) -> Iterator[Placed]:
        where, any_match = self.source.where, False
        for location, row in read_rows(self.source.path, self.split):
            if all(_field(location, row, name, "where") in where[name] for name in where):
                any_match = True
                yield location, row
        if where and not any_match:
            condition = " and ".join(f"{name} is one of {values}" for name, values in where.items())
            raise DataError(f"{self.source.path} has no row whose {condition}")


def rows_of(
    open_readers: Callable[[], Sequence[SourceReader]],
    data: DataSection,
    name: str,
    seed: int,
    fields: Collection[str] | None = None,
) -> tuple[Sequence[SourceReader], Rows]:
    """The rows of all sources in order, or ``data.limit`` of them, drawn by the seed.

    Of a share that is held out, ``name`` says which side, and ``fields`` decide it; the sources
    are then read twice. Validation data may have fewer rows than the limit. The readers have their
    counts once the rows are read.
    """
    readers = open_readers()
    rows: Rows = (
        (index, location, row) for index, reader in enumerate(readers) for location, row in reader
    )
    if split := held_out_of(data, seed, fields):
        boundary = split.boundary(row for reader in open_readers() for _, row in reader)
        rows = (
            entry for entry in rows
            if (split.number(entry[2]) <= boundary) == (name == "validation")
        )  # fmt: skip
    return readers, _limited(rows, data, name, seed)


def _limited(rows: Rows, data: DataSection, name: str, seed: int) -> Rows:
    if data.limit is None:
        return rows
    first = list(itertools.islice(rows, data.limit)) if name == "validation" else []
    if first and len(first) < data.limit:
        return iter(first)
    return draw(itertools.chain(first, rows), data.limit, seed, f"data.limit of data.{name}")


def draw(rows: Iterator[T], limit: int, seed: int, requested_by: str) -> Iterator[T]:
    """Yield ``limit`` of ``rows``, drawn uniformly by the seed, in their original order.

    One pass, with ``limit`` rows in memory (reservoir sampling).
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
        only = f"{in_number('there {are} only', seen)} {counted(seen, 'row')}"
        raise DataError(f"{requested_by}: is {limit}, but {only}; lower it")
    for _, row in sorted(reservoir, key=lambda item: item[0]):
        yield row


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


def _field(location: str, row: Row, name: str, key: str) -> Any:
    if name not in row:
        raise DataError(f"{location}: no field '{name}' (data {key}){did_you_mean(name, row)}")
    return row[name]
