"""One lm-evaluation-harness task of a suite's line: its definition and local files.

The rows of local files are checked before any model request.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io.hashes import sha256_file, sha256_json
from moe_finetune.io.rows import Row, placed_rows


def load_rows(path: Path, template: str | None = None) -> Any:
    """Return the rows of a local file as a ``datasets.Dataset``.

    Args:
        path: see :func:`moe_finetune.io.rows.read_rows` for the file types.
        template: the template of these rows, which are checked and converted to its form.
    """
    return _load(path, path.stat().st_mtime_ns, template)


@lru_cache(maxsize=256)
def _load(path: Path, modified_ns: int, template: str | None) -> Any:
    from datasets import Dataset

    read = TEMPLATES.get(template or "", lambda row: row)
    places, rows = [], []
    for origin, row in placed_rows(path, finite=False):
        try:
            rows.append(read(row))
        except ValueError as error:
            raise DataError(f"{origin}: {error}") from None
        if missing := [field for field in rows[0] if field not in row]:
            raise DataError(f"{origin}: no field '{missing[0]}', which the first row has")
        places.append(origin)
    if not rows:
        raise DataError(f"{path} has no rows")
    try:
        return Dataset.from_list(rows)
    except (TypeError, ValueError, OverflowError) as error:
        # pyarrow's errors do not name the row.
        for name, first, origin, value in _odd_types(rows, places):
            raise DataError(
                f"{origin}: field '{name}' is {value!r:.60} where the first row has "
                f"{first!r:.60}; a field must have one type in all rows"
            ) from None
        raise DataError(f"{path}: the rows do not form a table: {error}") from None


def _odd_types(rows: list[Row], places: list[str]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield fields whose type differs from the first row's: (field, first value, place, value)."""
    for name, first in rows[0].items():
        for row, origin in zip(rows, places, strict=True):
            value = row[name]
            numbers = (int, float)
            alike = isinstance(value, type(first)) or (
                type(value) in numbers and type(first) in numbers
            )
            if None not in (value, first) and not alike:
                yield name, first, origin, value


def _exact_match(row: Row) -> Row:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"'answer' must be a text or a number, not {answer!r:.60}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"'answer' is {answer}")
    answer = str(answer)
    if not answer.strip():
        raise ValueError("'answer' is empty")
    return row | {"question": _question(row), "answer": answer}


def _loglikelihood(row: Row) -> Row:
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"'choices' must be a list of two or more texts, not {choices!r:.60}")
    if odd := [choice for choice in choices if not isinstance(choice, str) or not choice]:
        raise ValueError(f"'choices' must be texts, and one is {odd[0]!r:.60}")
    if isinstance(answer, str) and answer in choices:
        index = choices.index(answer)
    elif (
        isinstance(answer, (int, float))
        and not isinstance(answer, bool)
        and answer in range(len(choices))
    ):
        index = int(answer)
    else:
        raise ValueError(
            f"'answer' is {answer!r:.60}, which is neither one of the choices nor an index from 0 "
            f"to {len(choices) - 1}"
        )
    return row | {"question": _question(row), "answer": index}


def _question(row: Row) -> str:
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"'question' must be a text, not {question!r:.60}")
    return question


TEMPLATES: dict[str, Callable[[Row], Row]] = {
    "local_exact_match": _exact_match,
    "local_loglikelihood": _loglikelihood,
}


@dataclass(frozen=True)
class Leaf:
    """One lm-eval task of a suite's line: its config and local files.

    Attributes:
        config: the task's YAML with includes and functions resolved.
        files: split -> local file (empty when the data comes from the hub).
        missing: local files that do not exist.
        template: the template of the task.
        tested: the split whose rows are evaluated.
        examples: the split that few-shot examples are drawn from; None without examples.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)
    missing: tuple[Path, ...] = ()
    template: str | None = None
    tested: str | None = None
    examples: str | None = None

    def load(self) -> Any:
        """Return the local files as a ``datasets.DatasetDict``, all rows checked."""
        from datasets import DatasetDict

        return DatasetDict(
            {split: load_rows(path, self.template) for split, path in self.files.items()}
        )

    def reports(self) -> set[str]:
        """Return the scores of the task, each ``"metric,filter"``."""
        from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY

        kind = self.config.get("output_type", "generate_until")
        listed = self.config.get("metric_list")
        metrics = DEFAULT_METRIC_REGISTRY[kind] if listed is None else [m["metric"] for m in listed]
        filters = [f["name"] for f in self.config.get("filter_list") or [{"name": "none"}]]
        return {f"{getattr(m, '__name__', m)},{name}" for m in metrics for name in filters}

    def data_hashes(self) -> dict[str, str]:
        """Return split -> SHA-256 of the local file."""
        return {
            split: _file_hash(path, path.stat().st_mtime_ns)
            for split, path in sorted(self.files.items())
        }

    def config_hash(self) -> str:
        """Return a hash of the task's definition, without the paths of its files."""
        hidden = ("custom_dataset", "dataset_kwargs", "metadata")
        return sha256_json({k: v for k, v in self.config.items() if k not in hidden})


@cache
def _file_hash(path: Path, modified_ns: int) -> str:
    return sha256_file(path)


def require_files(leaves: list[Leaf]) -> None:
    """Raise DataError for the first missing local file."""
    for leaf in leaves:
        if leaf.missing:
            more = f" (and {len(leaf.missing) - 1} more)" if len(leaf.missing) > 1 else ""
            raise DataError(
                f"task {leaf.name}: data file {leaf.missing[0]} does not exist{more}; "
                "give the folder of its files as data_dir; 'eval --check' lists what a suite needs"
            )
