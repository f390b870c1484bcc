"""Which files of a folder are for training, validation and testing, by the words in their names."""

import re
from pathlib import Path

from moe_finetune.errors import DataError
from moe_finetune.io.row_files import TABLES, kind_of

SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Split -> words in the names of its files, as on the hub."""
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that ``datasets`` saved."""
_NOTES = (*SAVED, "dataset_infos.json")


def local_files(source: str, split: str) -> list[Path] | None:
    """A source's local files of rows; None for what ``datasets`` saved or has to download."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        saved = any((path / name).is_file() for name in SAVED)
        return None if saved else files_of(path, split)
    if kind_of(path) in (*TABLES, ".txt") or path.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"no data file or folder {source} (relative to {Path.cwd()})")
    return None


def files_of(folder: Path, split: str) -> list[Path]:
    """Files with the rows of ``split``: those named after it, or all if no name has a split."""
    files = data_files(folder)
    if not files:
        nested = sorted({path.parent.name for path in folder.glob("*/*") if _has_rows(path)})
        remedy = f"; give one of its folders: {', '.join(nested)}" if nested else ""
        kinds = ", ".join((*TABLES, ".txt"))
        raise DataError(f"the folder {folder} has no files of type {kinds}{remedy}")
    named: dict[str, list[Path]] = {name: [] for name in (*SPLITS, "")}
    for file in files:
        splits = splits_of(file)
        if len(splits) > 1:
            raise DataError(
                f"{file}: its name has words of two splits ({' and '.join(splits)}); list the "
                "files in place of the folder"
            )
        named[splits[0] if splits else ""].append(file)
    chosen, others = named.get(split, []), named[""]
    if chosen and others:
        raise DataError(
            f"the folder {folder} has files for '{split}' ({_names(chosen)}) and files whose names "
            f"have no split ({_names(others)}); list the files in its place"
        )
    if others and (split == "train" or len(others) == len(files)):
        return others
    if not chosen:
        raise DataError(
            f"the folder {folder} has no files for '{split}', only {_names(files)}; list the files "
            "in its place"
        )
    return chosen


def data_files(folder: Path) -> list[Path]:
    """Files of rows in ``folder`` or, as downloads from the hub have them, in its ``data``.

    Text files count where there are no tables.
    """
    top, nested = _of(folder), _of(folder / "data")
    if top and nested:
        raise DataError(
            f"the folder {folder} has files of rows ({_names(top)}) and so has its folder 'data'; "
            "give one of them, or list the files"
        )
    return top or nested


def has_validation(source: str) -> bool:
    """Whether ``source`` is a folder with files for training and files for validation."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or any((folder / name).is_file() for name in SAVED):
        return False
    return any(splits_of(file) == ["validation"] for file in data_files(folder))


def splits_of(file: Path) -> list[str]:
    """The splits whose words are in the file's name; a text's name is often its title."""
    name = file.name.partition(".")[0].lower()
    words = set(re.findall("[a-z]+", name))
    if kind_of(file) == ".txt" and len(words) > 1:
        return []
    return [split for split, usual in SPLITS.items() if words & usual]


def _of(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [file for file in files if _has_rows(file)]
    return [file for file in files if kind_of(file) in TABLES] or files


def _has_rows(path: Path) -> bool:
    known = kind_of(path) in (*TABLES, ".txt")
    return known and path.is_file() and path.name not in _NOTES


def _names(files: list[Path]) -> str:
    more = f" and {len(files) - 4} more" if len(files) > 5 else ""
    return ", ".join(file.name for file in files[: 4 if more else 5]) + more
