"""NuminaMath: boxed answers."""

from __future__ import annotations

from moe_finetune.evaluation.extract import boxed, math_answer, math_equal


def with_answer(dataset):
    """Keep problems whose reference has a boxed answer; proofs cannot be checked by rule."""
    return dataset.filter(lambda row: boxed(row["solution"]) is not None)


def score(doc, results):
    """Compare the reply's final answer with the reference's."""
    return {"exact_match": float(math_equal(math_answer(results[0]), boxed(doc["solution"])))}
