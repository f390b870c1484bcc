"""Local files of records, read row by row: JSONL, JSON, Parquet and CSV; JSONL written."""

import csv
import gzip
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from moe_finetune.errors import DataError
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.hashes import to_json
from moe_finetune.io.json_file import JsonError, parse_items, parse_json

Row = dict[str, Any]
Placed = tuple[str, Row]
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


def kind_of(path: Path) -> str:
    """The suffix that determines how a file is read, ignoring ``.gz``."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_rows(path: str | Path, required: tuple[str, ...] = ()) -> list[Row]:
    """A local file of records in memory; NaN is allowed, because results contain it."""
    path, rows = Path(path), []
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    for location, row in placed_rows(path, finite=False):
        if missing := [field for field in required if field not in row]:
            raise DataError(
                f"{location}: no field '{missing[0]}'; the row has "
                f"{', '.join(sorted(map(str, row))) or 'no fields'}"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path} contains no rows")
    return rows


def placed_rows(path: Path, finite: bool = True) -> Iterator[Placed]:
    """Yield ``(location, row)`` of an existing file of records, which may be gzipped.

    ``location`` is ``file:line`` for JSONL and CSV, otherwise ``file: row N`` (from 1). A ``.txt``
    file is one row of ``text``.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _read_parquet(path)
        return
    if kind not in (*TABLES, ".txt"):
        kinds = ", ".join((*TABLES, ".txt"))
        raise DataError(f"{path}: unknown file type; it must be one of {kinds}")
    opener = gzip.open if path.suffix == ".gz" else open
    newline = "" if kind == ".csv" else None
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            if kind == ".csv":
                yield from _read_csv(path, file)
            elif kind == ".txt":
                yield str(path), {"text": file.read()}
            elif kind == ".json":
                yield from _read_json(path, file, finite)
            else:
                yield from _read_lines(path, file, finite)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}") from error
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error


def _read_csv(path: Path, file: Iterable[str]) -> Iterator[Placed]:
    csv.field_size_limit(sys.maxsize)  # 131,072 characters by default
    lines = iter(file)
    header = next(lines, "")
    if "," not in header and (others := [mark for mark in ";\t|" if mark in header]):
        raise DataError(
            f"{path}:1: columns are separated by {others[0]!r}; write the file with commas, for "
            f"example pandas.read_csv(FILE, sep={others[0]!r}).to_csv(NEW, index=False)"
        )
    reader = csv.DictReader(itertools.chain([header], lines), strict=True)
    refuse_twice(path, reader.fieldnames or ())
    for row in reader:
        location = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            columns = len(reader.fieldnames or ())
            raise DataError(f"{location}: must have {columns} fields, as in the header")
        yield location, row


def _read_lines(path: Path, lines: Iterable[str], finite: bool) -> Iterator[Placed]:
    for line_number, line in enumerate(lines, 1):
        if line.strip():
            location = f"{path}:{line_number}"
            try:
                row = parse_json(line, finite)
            except JsonError as error:
                raise DataError(f"{location}: {error.problem}") from None
            yield location, _object(row, location)


def _read_json(path: Path, file: IO[str], finite: bool) -> Iterator[Placed]:
    """A JSON array of objects, or JSON lines under the name ``.json``."""
    text = file.read()
    if not text.lstrip().startswith("["):
        if text.lstrip().split("\n", 1)[0].strip() == "{":
            raise DataError(
                f"{path}: has objects over several lines; write each in a line of its own, or "
                "all in one list: [{...}, {...}]"
            )
        yield from _read_lines(path, text.split("\n"), finite)  # U+2028 is no end of line
        return
    row_number = 0
    try:
        for row_number, row in enumerate(parse_items(text, finite), 1):
            location = f"{path}: row {row_number}"
            yield location, _object(row, location)
    except JsonError as error:
        line = f"{path}:{error.line}" if error.line else f"{path}: row {row_number + 1}"
        raise DataError(f"{line}: {error.problem}") from None


def _object(row: Any, location: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{location}: must be an object, not {short(row)}")
    return row


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    row_number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                for row in batch.to_pylist():
                    row_number += 1
                    yield f"{path}: row {row_number}", without_nulls(row)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}") from error


def without_nulls(row: Row) -> Row:
    """A table's row without the nulls inside its columns' values.

    A table gives every object the fields of all objects, so that a call would get the arguments of
    others.
    """
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def short(value: Any) -> str:
    """The start of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    write_atomic(path, "".join(to_json(row) + "\n" for row in rows))


def refuse_twice(file: Path, columns: Sequence[str]) -> None:
    """Raise DataError if a table's header has a column twice; the last would silently win."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{file}:1: the column '{twice[0]}' occurs twice; rename one of them")
