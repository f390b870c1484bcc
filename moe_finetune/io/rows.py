"""Local files of records, read row by row: JSONL, JSON, Parquet and CSV; JSONL written."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.hashes import to_json
from moe_finetune.io.json_file import JsonError, parse_json, read_json
from moe_finetune.io.text_file import refuse_twice, short_lines

ROW_FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


def read_rows(path: str | Path, required: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read a local file of records (JSONL, JSONL.gz, JSON list, Parquet or CSV).

    Args:
        path: the file.
        required: fields that every row must have.

    Raises:
        DataError: the file is missing, empty or of another kind, or a row is malformed; the
            message names the file and the line.
    """
    rows = []
    for number, row in numbered_rows(Path(path)):
        if missing := [field for field in required if field not in row]:
            raise DataError(
                f"{path}, line {number}: no field '{missing[0]}'; the row has "
                f"{', '.join(sorted(map(str, row))) or 'no fields'}"
            )
        rows.append(row)
    return rows


def numbered_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row) of a local file of records; see :func:`read_rows`.

    Raises:
        DataError: as there, at the row where it is met.
    """
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    number = 0
    for number, row in _numbered_values(path):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a row must be an object, got {row!r:.60}")
        yield number, row
    if not number:
        raise DataError(f"{path} holds no rows")


def _numbered_values(path: Path) -> Iterator[tuple[int, Any]]:
    name = path.name
    try:
        if name.endswith((".jsonl", ".jsonl.gz")):
            opener = gzip.open if name.endswith(".gz") else open
            with opener(path, "rt", encoding="utf-8") as stream:
                for number, line in enumerate(short_lines(stream, path), 1):
                    if line.strip():
                        try:
                            yield number, parse_json(line, finite=False)
                        except JsonError as error:
                            raise DataError(f"{path}, line {number}: {error.problem}") from None
        elif name.endswith(".json"):
            content = read_json(path, DataError, "write it as .jsonl", finite=False)
            if not isinstance(content, list):
                raise DataError(f"{path}: a .json data file must hold one list of objects")
            yield from enumerate(content, 1)
        elif name.endswith(".csv"):
            with path.open(newline="", encoding="utf-8") as stream:
                reader = csv.DictReader(short_lines(stream, path))
                refuse_twice(path, reader.fieldnames or ())
                yield from enumerate(reader, 2)
        elif name.endswith(".parquet"):
            import pyarrow.parquet

            yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        else:
            raise DataError(f"{path}: unknown kind of file; known: {', '.join(ROW_FORMATS)}")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        raise DataError(f"{path} is damaged: {error}") from None


def read_log(path: Path) -> list[Any]:
    """Values of a file of JSON lines that this package wrote; NaN is read, as a log has it.

    Raises:
        OSError: it cannot be read.
        ValueError: not UTF-8, or a line is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [parse_json(line, finite=False) for line in lines]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    write_atomic(path, "".join(to_json(row) + "\n" for row in rows))
