"""Competition mathematics: boxed answers."""

from __future__ import annotations

from moe_finetune.errors import DataError
from moe_finetune.evaluation.final_answers import boxed, math_answer
from moe_finetune.evaluation.math_equivalence import require, same_answer


def with_answer(dataset):
    """Keep problems whose reference has a boxed answer; proofs cannot be checked by rule."""
    require()
    return dataset.filter(lambda row: boxed(row["solution"]) is not None)


def all_answered(dataset):
    """Refuse rows without a boxed answer: in MATH every problem has one."""
    require()
    for number, solution in enumerate(dataset["solution"], 1):
        if boxed(solution) is None:
            raise DataError(
                f"row {number}: the solution has no \\boxed{{}} answer: {solution!r:.80}"
            )
    return dataset


def score(doc, results):
    """Compare the reply's final answer with the reference's."""
    return {"exact_match": float(same_answer(math_answer(results[0]), boxed(doc["solution"])))}


def score_direct(doc, results):
    """The same for prompts that end with "The answer is"."""
    answer = math_answer(f"The answer is {results[0].lstrip()}")
    return {"acc": float(same_answer(answer, doc["answer"]))}
