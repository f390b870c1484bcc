"""Scoring of the local templates."""

from __future__ import annotations

from moe_finetune.errors import DataError


def exact(doc, results):
    """Compare reply and answer as text without surrounding white space."""
    return {"exact_match": float(results[0].strip() == str(doc["answer"]).strip())}


def choice(doc) -> int:
    """Return the index of the right choice, given as index or as text."""
    answer, choices = doc["answer"], list(doc["choices"])
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, (int, float)) and 0 <= int(answer) < len(choices):
        return int(answer)
    raise DataError(f"answer {answer!r} is neither one of the choices {choices} nor an index")
