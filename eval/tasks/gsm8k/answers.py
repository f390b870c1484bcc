"""GSM8K: the final number of a reply, by the strict or the flexible rule."""

from __future__ import annotations

from moe_finetune.evaluation.final_answers import final_number, strict_number


def strict(resps, docs):
    """Return the number after ``####`` of every reply, as text ('' when there is none)."""
    return [[_text(strict_number(reply)) for reply in replies] for replies in resps]


def flexible(resps, docs):
    """Return the final number of every reply by the flexible rule."""
    return [[_text(final_number(reply)) for reply in replies] for replies in resps]


def _text(number) -> str:
    return "" if number is None else str(number)


def score(doc, results):
    """Compare the extracted number with the reference's."""
    return {"exact_match": float(results[0] == str(strict_number(doc["answer"])))}
