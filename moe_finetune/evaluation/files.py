"""The files that evaluation reads and keeps: hashes, canonical JSON, local rows."""

from __future__ import annotations

import csv
import gzip
import hashlib
import inspect
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io import write_atomic
from moe_finetune.json_file import JsonError, parse_json, read_json
from moe_finetune.text_file import refuse_twice, short_lines

ROW_FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
_WEIGHTS = (".safetensors", ".bin")
_IDENTITY_SUFFIXES = (*_WEIGHTS, ".json", ".jinja", ".model", ".txt")
# Written beside a checkpoint by people and tools; they change nothing that a model answers.
_NOT_IDENTITY = ("README.md", "trainer_state.json", "training_args.json", "environment.json")


def to_json(value: Any, indent: int | None = None, sort: bool = True) -> str:
    """Return JSON with real characters, canonical when sorted; unknown objects become text."""
    return json.dumps(value, sort_keys=sort, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if inspect.isroutine(value):
        # A function's repr holds an address; its name and source are what decides.
        try:
            return f"{value.__qualname__} {sha256_text(inspect.getsource(value))}"
        except (OSError, TypeError):
            return value.__qualname__
    return str(value)


def sha256_text(text: str) -> str:
    """Return the SHA-256 of ``text`` in UTF-8, as hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of ``value``."""
    return sha256_text(to_json(value))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checkpoint_hash(folder: str | Path) -> str:
    """Return one SHA-256 over the weights, config and tokenizer files of a checkpoint folder.

    The name and place of the folder do not count, so a copy has the same hash, and a checkpoint
    trained again in place has another.

    Raises:
        CheckpointError: ``folder`` is no folder, or holds neither a config nor an adapter.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint '{folder}' is not a folder")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{folder} has no config.json and no adapter_config.json; give the folder of a "
            "complete checkpoint"
        )
    files = sorted(
        f
        for f in folder.iterdir()
        if f.is_file() and f.name.endswith(_IDENTITY_SUFFIXES) and f.name not in _NOT_IDENTITY
    )
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(sha256_file, files))
    return sha256_json([[f.name, digest] for f, digest in zip(files, digests, strict=True)])


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


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    write_atomic(path, "".join(to_json(row) + "\n" for row in rows))
