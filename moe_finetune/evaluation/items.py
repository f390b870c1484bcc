"""Items of a samples file, for judges and people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.io.rows import read_rows

# Fields of a sample that judges and people need.
ITEM_FIELDS = ("task", "doc_id", "item", "doc", "target", "replies")


def read_items(samples: str | Path, *more: str) -> list[dict[str, Any]]:
    """Read one row per task and item; a file has one per answer extraction too.

    Args:
        more: further required fields.

    Raises:
        DataError: a row without a field.
    """
    return one_row_per_item(read_rows(samples, (*ITEM_FIELDS, *more)))


def one_row_per_item(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one row per task and item; samples have one per answer extraction."""
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        first.setdefault((row["task"], row["doc_id"]), row)
    return list(first.values())


def item_texts(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return question, reference and answer of a sample."""
    doc, replies = row["doc"], row["replies"]
    try:
        answer = replies[0][0]
    except (IndexError, KeyError, TypeError):
        answer = None
    if not isinstance(doc, dict) or not isinstance(answer, str):
        raise DataError(
            f"item {row.get('doc_id')} of task {row.get('task')}: doc is not an object, or replies "
            "have no text"
        )
    question = next((str(doc[n]) for n in ("question", "problem", "prompt") if n in doc), None)
    if question is None:
        raise EvaluationError(f"the item has no field 'question'; it has {', '.join(sorted(doc))}")
    return question, str(row["target"]), answer
