"""Rows of training files, folders and hub datasets, each with its location."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, did_you_mean, reason_of
from moe_finetune.io.hashes import sha256_file
from moe_finetune.io.hub import check_hub
from moe_finetune.io.rows import TABLES, Placed, kind_of, placed_rows, without_nulls
from moe_finetune.io.split_files import SAVED, data_files, files_of

_SUFFIXES = (*TABLES, ".txt")


def read_rows(source: str, split: str = "train") -> Iterator[Placed]:
    """Yield ``(location, row)`` of a file, a folder of files, a saved dataset, or a hub dataset.

    The location is ``file:line`` for JSONL and CSV and ``file: row N`` (from 1) otherwise. A hub id
    may name a configuration: ``openai/gsm8k:main``. A ``.txt`` file is one row of ``text``. Of a
    folder, the files of ``split`` are read, see :mod:`moe_finetune.io.split_files`.

    Raises:
        DataError: no such file or dataset, or a line cannot be parsed.
    """
    path = Path(source).expanduser()
    if path.is_file():
        yield from placed_rows(path)
    elif path.is_dir():
        yield from _read_folder(path, split)
    elif _names_a_file(source):
        raise DataError(f"no data file or folder {source} (relative to {Path.cwd()})")
    else:
        yield from _from_datasets(source, _hub_dataset(source, split), split)


def source_identity(source: str, split: str = "train") -> list[Any]:
    """Plain values that identify a source's content: equal if :func:`read_rows` yields equal rows.

    Files are identified by content, so a copy is the same source and a changed file is not; a hub
    dataset by its fingerprint.

    Raises:
        DataError: no such file or dataset.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [[kind_of(path), sha256_file(path)]]
    if path.is_dir():
        saved = sorted(p for p in path.rglob("*") if p.is_file())
        files = saved if _is_saved(path) else files_of(path, split)
        return [split, *([str(p.relative_to(path)), sha256_file(p)] for p in files)]
    if _names_a_file(source):
        raise DataError(f"no data file or folder {source} (relative to {Path.cwd()})")
    return [source, split, _hub_dataset(source, split)._fingerprint]


def _names_a_file(source: str) -> bool:
    path = Path(source).expanduser()
    return kind_of(path) in _SUFFIXES or path.is_absolute() or source.startswith((".", "~"))


def files_line(source: str, split: str) -> str | None:
    """Which files of a folder are read, and which are not; None for any other source."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or _is_saved(folder):
        return None
    chosen = files_of(folder, split)
    others = [path.name for path in data_files(folder) if path not in chosen]
    notes = [path.name for path in sorted(folder.iterdir()) if kind_of(path) == ".txt"]
    others += [name for name in notes if name not in {path.name for path in chosen}]
    skipped = f" (not read: {', '.join(dict.fromkeys(others))})" if others else ""
    return f"{source}: {', '.join(path.name for path in chosen)}{skipped}"


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _read_folder(folder: Path, split: str) -> Iterator[Placed]:
    from datasets import load_from_disk

    if _is_saved(folder):
        saved: Any = load_from_disk(str(folder))
        yield from _from_datasets(str(folder), saved, split)
        return
    for file in files_of(folder, split):
        yield from placed_rows(file)


def _from_datasets(name: str, dataset: Any, split: str) -> Iterator[Placed]:
    if isinstance(dataset, Mapping):
        if split not in dataset:
            raise DataError(f"{name} has no split '{split}'{did_you_mean(split, dataset)}")
        dataset = dataset[split]
    for index, row in enumerate(dataset, 1):
        yield f"{name}: row {index}", without_nulls(row)


def _hub_dataset(source: str, split: str) -> Any:
    from datasets import load_dataset

    check_hub()
    name, _, configuration = source.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the libraries raise a dozen unrelated types here
        reason = reason_of(error)
        raise DataError(
            f"'{source}' is not a file or folder (relative to {Path.cwd()}), and it cannot be "
            f"loaded as a hub dataset: {reason}"
        ) from error
