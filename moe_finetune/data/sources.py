"""Rows of training files, folders and hub datasets, each with the place where it stands."""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.json_file import JsonError, parse_json
from moe_finetune.io.text_file import refuse_twice, short_lines

Row = dict[str, Any]
Placed = tuple[str, Row]
MAX_FILE = 256 << 20  # characters of a .json file, which is read whole
_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_SUFFIXES = (*_TABLES, ".txt")


def read_rows(source: str, split: str = "train") -> Iterator[Placed]:
    """Yield ``(place, row)`` of a file, a folder of files, a saved dataset, or a hub dataset.

    ``place`` is ``file:line`` for JSONL and CSV and ``file: row N`` (from 1) otherwise. A hub id
    may name a configuration: ``openai/gsm8k:main``. A ``.txt`` file is one row of ``text``; in a
    folder with files of rows it is taken for a note about them and left out.

    Raises:
        DataError: no such file or dataset, or a line that cannot be parsed.
    """
    path = Path(source).expanduser()
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        yield from _read_folder(path, split)
    elif _names_a_file(source):
        raise DataError(f"there is no data file or folder {source} (looked from {Path.cwd()})")
    else:
        yield from _from_datasets(source, _hub_dataset(source, split), split)


def source_identity(source: str, split: str = "train") -> list[Any]:
    """What a source holds, as plain values: equal where :func:`read_rows` gives equal rows.

    Files count by their content, so a copy is the same source and a changed file another; a hub
    dataset counts by its fingerprint.

    Raises:
        DataError: no such file or dataset.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [[_suffix(path), _content_hash(path)]]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return [split, *([str(p.relative_to(path)), _content_hash(p)] for p in files)]
    if _names_a_file(source):
        raise DataError(f"there is no data file or folder {source} (looked from {Path.cwd()})")
    return [source, split, _hub_dataset(source, split)._fingerprint]


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names_a_file(source: str) -> bool:
    path = Path(source).expanduser()
    return _suffix(path) in _SUFFIXES or path.is_absolute() or source.startswith((".", "~"))


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _read_folder(folder: Path, split: str) -> Iterator[Placed]:
    from datasets import load_from_disk

    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved: Any = load_from_disk(str(folder))
        yield from _from_datasets(str(folder), saved, split)
        return
    files = sorted(p for p in folder.iterdir() if p.is_file() and _suffix(p) in _SUFFIXES)
    if not files:
        raise DataError(f"the folder {folder} holds none of {', '.join(_SUFFIXES)}")
    tables = [file for file in files if _suffix(file) in _TABLES]
    for file in tables or files:
        yield from _read_file(file)


def _from_datasets(name: str, dataset: Any, split: str) -> Iterator[Placed]:
    if isinstance(dataset, Mapping):
        if split not in dataset:
            raise DataError(f"{name} has no split '{split}'{did_you_mean(split, dataset)}")
        dataset = dataset[split]
    for number, row in enumerate(dataset, 1):
        yield f"{name}: row {number}", row


def _hub_dataset(source: str, split: str) -> Any:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the libraries raise a dozen unrelated types here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"'{source}' is not a file or folder here (looked from {Path.cwd()}), and as a hub "
            f"dataset it cannot be loaded: {reason}"
        ) from error


def _read_file(path: Path) -> Iterator[Placed]:
    suffix = _suffix(path)
    if suffix not in _SUFFIXES:
        raise DataError(f"{path}: unknown kind of file; wanted one of {', '.join(_SUFFIXES)}")
    if suffix == ".parquet":
        yield from _read_parquet(path)
        return
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(
            path, "rt", encoding="utf-8-sig", newline="" if suffix == ".csv" else None
        ) as f:
            if suffix == ".csv":
                reader = csv.DictReader(short_lines(f, path), strict=True)
                refuse_twice(path, reader.fieldnames or ())
                for row in reader:
                    if None in row or None in row.values():
                        wanted = len(reader.fieldnames or ())
                        raise DataError(
                            f"{path}:{reader.line_num}: wanted {wanted} fields as in the header"
                        )
                    yield f"{path}:{reader.line_num}", row
            elif suffix == ".txt":
                yield str(path), {"text": _whole(path, f)}
            elif suffix == ".json":
                yield from _read_json(path, f)
            else:
                yield from _read_lines(path, f)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}") from error
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error


def _read_lines(path: Path, lines: Iterable[str]) -> Iterator[Placed]:
    for number, line in enumerate(short_lines(lines, path), 1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _read_json(path: Path, file: IO[str]) -> Iterator[Placed]:
    """A JSON array of objects, or JSON lines under the name ``.json``."""
    text = _whole(path, file)
    if not text.lstrip().startswith("["):
        yield from _read_lines(path, text.splitlines())
        return
    try:
        rows = parse_json(text)
    except JsonError as error:
        raise DataError(f"{path}:{error.line or 1}: {error.problem}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number}: wanted an object, got {short(row)}")
        yield f"{path}: row {number}", row


def _whole(path: Path, file: IO[str]) -> str:
    text = file.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise DataError(f"{path}: has more than {MAX_FILE >> 20} MiB of text; write it as .jsonl")
    return text


def _parse(line: str, place: str) -> Row:
    try:
        row = parse_json(line)
    except JsonError as error:
        raise DataError(f"{place}: {error.problem}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: wanted an object, got {short(row)}")
    return row


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}") from error


def short(value: Any) -> str:
    """The start of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
