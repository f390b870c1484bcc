"""Rows of training files: read, checked, and brought into one of three forms, with their place.

Forms: ``{"messages": [{"role", "content"}, ...]}``, ``{"prompt", "completion"}``, ``{"text"}``.
A row that has none of them is refused with its file and line; nothing is skipped silently.
"""

from __future__ import annotations

import csv
import gzip
import json
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from moe_finetune.errors import DataError, did_you_mean

Form = Literal["messages", "prompt_completion", "text"]
Row = dict[str, Any]
Placed = tuple[str, Row]

FIELDS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
QUESTION_TEMPLATE = {"prompt": "Question: {question}\nAnswer:", "completion": " {answer}"}
"""GSM8K's layout as lm-evaluation-harness asks it; used for ``question``/``answer`` rows."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


def read_rows(source: str, split: str = "train") -> Iterator[Placed]:
    """Yield ``(place, row)`` of a file, a folder of files, a saved dataset, or a hub dataset.

    ``place`` is ``file:line`` for JSONL and CSV and ``file: row N`` (from 1) otherwise. A hub id
    may name a configuration: ``openai/gsm8k:main``.

    Raises:
        DataError: no such file or dataset, or a line that cannot be parsed.
    """
    path = Path(source).expanduser()
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        yield from _read_folder(path, split)
    elif _suffix(path) in _SUFFIXES or path.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"there is no data file or folder {source} (looked from {Path.cwd()})")
    else:
        yield from _read_hub(source, split)


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
    for file in files:
        yield from _read_file(file)


def _from_datasets(name: str, dataset: Any, split: str) -> Iterator[Placed]:
    if isinstance(dataset, Mapping):
        if split not in dataset:
            raise DataError(f"{name} has no split '{split}'{did_you_mean(split, dataset)}")
        dataset = dataset[split]
    for number, row in enumerate(dataset, 1):
        yield f"{name}: row {number}", row


def _read_hub(source: str, split: str) -> Iterator[Placed]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        dataset = load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the libraries raise a dozen unrelated types here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"'{source}' is no file or folder here (looked from {Path.cwd()}), and as a hub "
            f"dataset it cannot be loaded: {reason}"
        ) from error
    yield from _from_datasets(source, dataset, split)


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
                reader = csv.DictReader(f, strict=True)
                for row in reader:
                    if None in row or None in row.values():
                        wanted = len(reader.fieldnames or ())
                        raise DataError(
                            f"{path}:{reader.line_num}: wanted {wanted} fields as in the header"
                        )
                    yield f"{path}:{reader.line_num}", row
            elif suffix == ".json":
                yield from _read_json(path, f)
            else:
                yield from _read_lines(path, f)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}") from error
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error


def _read_lines(path: Path, lines: Iterable[str]) -> Iterator[Placed]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _read_csv(path: Path, file: IO[str]) -> Iterator[Placed]:
    reader = csv.DictReader(file, strict=True)
    for row in reader:
        place = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            wanted = len(reader.fieldnames or ())
            raise DataError(f"{place}: wanted {wanted} fields, as in the header")
        yield place, row


def _read_json(path: Path, file: IO[str]) -> Iterator[Placed]:
    """A JSON array of objects, or JSON lines under the name ``.json``."""
    text = file.read()
    if not text.lstrip().startswith("["):
        yield from _read_lines(path, text.splitlines())
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number}: wanted an object, got {_short(row)}")
        yield f"{path}: row {number}", row


def _parse(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: wanted an object, got {_short(row)}")
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


class Former:
    """Brings the rows of one source into a form, by the recipe's ``format`` and columns.

    Args:
        form: the recipe's ``data.format``; "auto" decides by the first row's fields.
        columns: our field -> the file's field.
        template: our field -> a text with the file's fields in braces.
    """

    def __init__(
        self,
        form: Form | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        template: Mapping[str, str] | None = None,
    ):
        self.form = form
        self.columns = columns or {}
        self.template = template or {}
        ours = {field for fields in FIELDS.values() for field in fields}
        for name, mapping in (("columns", self.columns), ("template", self.template)):
            for field in mapping:
                if field not in ours:
                    raise DataError(f"data.{name}.{field}: unknown{did_you_mean(field, ours)}")
        for field, pattern in self.template.items():
            _names(pattern, f"data.template.{field}")

    def __call__(self, place: str, row: Row) -> Row:
        """The row in its form; raise DataError with ``place`` when it has none."""
        row = self._mapped(place, row)
        if self.form == "auto":
            self.form = _detect(place, row)
        if self.form == "messages":
            return {"messages": _messages(place, row)}
        for field in FIELDS[self.form]:
            if field not in row:
                raise DataError(
                    f"{place}: no field '{field}', wanted {' and '.join(FIELDS[self.form])} "
                    f"(data.format {self.form}); the row has {', '.join(row) or 'no fields'}"
                )
            if not isinstance(row[field], str):
                raise DataError(f"{place}: '{field}': wanted text, got {_short(row[field])}")
        last = FIELDS[self.form][-1]
        if not row[last].strip():
            raise DataError(f"{place}: '{last}' is empty; there is nothing to learn from it")
        return {field: row[field] for field in FIELDS[self.form]}

    def _mapped(self, place: str, row: Row) -> Row:
        template = self.template
        if not template and not self.columns and {"question", "answer"} <= row.keys():
            template = {} if _has_form(row) else QUESTION_TEMPLATE
        if template:
            return {
                f: _fill(text, row, f"{place}: data.template.{f}") for f, text in template.items()
            }
        mapped = dict(row)
        for ours, theirs in self.columns.items():
            if theirs not in row:
                raise DataError(
                    f"{place}: no field '{theirs}' (data.columns.{ours})"
                    f"{did_you_mean(theirs, map(str, row))}"
                )
            mapped[ours] = row[theirs]
        return mapped


def _has_form(row: Row) -> bool:
    return any(set(fields) <= row.keys() for fields in FIELDS.values())


def _detect(place: str, row: Row) -> Form:
    found: list[Form] = [form for form, fields in FIELDS.items() if set(fields) <= row.keys()]
    if len(found) == 1:
        form = found[0]
        return "messages" if form == "prompt_completion" and _is_chat(row) else form
    has = f"the row has {', '.join(map(str, row)) or 'no fields'}"
    if found:
        raise DataError(f"{place}: fits {' and '.join(found)}; set data.format. {has}")
    raise DataError(
        f"{place}: wanted 'messages', 'prompt' and 'completion', 'question' and 'answer', or "
        f"'text'; {has}. Name yours with data.columns, for example "
        "data.columns={prompt: instruction, completion: output}"
    )


def _is_chat(row: Row) -> bool:
    return isinstance(row["prompt"], list) and isinstance(row["completion"], list)


def _messages(place: str, row: Row) -> list[dict[str, str]]:
    """The row's turns, checked; a prompt and a completion become a user and an assistant turn."""
    turns = row.get("messages")
    if turns is None and {"prompt", "completion"} <= row.keys():
        if _is_chat(row):
            turns = row["prompt"] + row["completion"]
        else:
            turns = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: 'messages': wanted a list of turns, got {_short(turns)}")
    checked = []
    for number, turn in enumerate(turns):
        where = f"{place}: messages[{number}]"
        if not isinstance(turn, dict):
            raise DataError(f"{where}: wanted {{role, content}}, got {_short(turn)}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = _SHAREGPT.get(str(role), role)
        if role not in ROLES:
            raise DataError(f"{where}: role {role!r}{did_you_mean(str(role), ROLES)}")
        if not isinstance(content, str):
            raise DataError(f"{where}: content: wanted text, got {_short(content)}")
        if role == "assistant" and not content.strip():
            raise DataError(f"{where}: the assistant's content is empty")
        checked.append({"role": role, "content": content})
    if checked[-1]["role"] != "assistant":
        raise DataError(
            f"{place}: the last message is from '{checked[-1]['role']}'; wanted the assistant's "
            "answer, which is what is learned"
        )
    return checked


def _names(pattern: str, place: str) -> list[str]:
    """Fields in braces; plain names only, because a format string can reach into objects."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise DataError(f"{place}: {error}; write a literal brace twice") from error
    for name in names:
        if not name.isidentifier():
            raise DataError(f"{place}: '{{{name}}}' is not a field's name")
    return names


def _fill(pattern: str, row: Row, place: str) -> str:
    for name in _names(pattern, place):
        if name not in row:
            raise DataError(f"{place}: no field '{name}'{did_you_mean(name, map(str, row))}")
    return pattern.format_map(row)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
