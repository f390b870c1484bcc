"""The rows of a suite's local files, which are checked before any model request."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io.row_files import Row, placed_rows


def load_rows(path: Path, template: str | None = None) -> Any:
    """The rows of a local file as a ``datasets.Dataset``, checked by their template."""
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
    if "\n" in answer.strip():
        raise ValueError("'answer' has a line break, where a reply ends")
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
    "local_judgement": _loglikelihood,
}
