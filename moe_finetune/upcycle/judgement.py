"""Yes-or-no questions after solved ones (P3 Table 2), answered by the likelier of two words.

A file's rows have ``question`` and ``answer``. Without a file the questions are made from texts:
two pieces of a text that follow each other (yes), or a piece and one of another text of the same
category (no). Solved questions come from the training texts, asked ones from the test texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.errors import DataError

if TYPE_CHECKING:
    from moe_finetune.upcycle.recipe import JudgementSection
    from moe_finetune.upcycle.texts import Split, Texts

ANSWERS = (" no", " yes")
SEED = 20


@dataclass(frozen=True)
class Question:
    """Token ids of a question up to its answer, and whether that is yes."""

    ids: list[int]
    answer: bool


def judge(model: Any, tokenizer: Any, texts: Texts, section: JudgementSection) -> dict[str, Any]:
    """Accuracy over the questions: ``accuracy``, ``stderr``, ``count``, ``yes`` (share of yes).

    An answer's score is the sum of its tokens' log-probabilities; a tie is a no.

    Raises:
        DataError: a file without questions for both shots and test, or with other fields.
    """
    import torch

    solved, asked = questions(tokenizer, texts, section)
    answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    end = tokenizer.encode("\n\n", add_special_tokens=False)
    prompt: list[int] = []
    for question in solved:
        prompt += question.ids + answers[question.answer] + end
    right, said_yes = 0, 0
    device = next(model.parameters()).device
    with torch.no_grad():
        for question in asked:
            start = prompt + question.ids
            scores = []
            for answer in answers:
                ids_S = torch.tensor(start + answer, device=device)
                logits_SV = model(
                    input_ids=ids_S[None], use_cache=False, logits_to_keep=len(answer) + 1
                ).logits[0, :-1]
                chosen_S = ids_S[len(start) :, None]
                scores.append(float(logits_SV.float().log_softmax(-1).gather(1, chosen_S).sum()))
            yes = scores[1] > scores[0]
            said_yes += yes
            right += yes == question.answer
    count = len(asked)
    accuracy = right / count
    return {
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "count": count,
        "yes": said_yes / count,
        "shots": len(solved),
    }


def questions(
    tokenizer: Any, texts: Texts, section: JudgementSection
) -> tuple[list[Question], list[Question]]:
    """Solved and asked questions; answers alternate in made ones, so chance is one half."""
    if section.file is not None:
        return _of_file(tokenizer, section)
    generator = np.random.default_rng(SEED)
    solved = _made(tokenizer, texts, "train", section.shots, section.piece, generator)
    asked = _made(tokenizer, texts, "test", section.items, section.piece, generator)
    if len(solved) < section.shots or not asked:
        raise DataError(
            f"evaluation.judgement: the texts are too short for pieces of {section.piece} tokens; "
            "lower evaluation.judgement.piece, or set evaluation.judgement: null"
        )
    return solved, asked


def check_file(section: JudgementSection) -> list[dict[str, Any]]:
    """Rows of the recipe's file of questions.

    Raises:
        DataError: no such file, other fields, or too few rows.
    """
    from moe_finetune.io.rows import read_rows

    rows = read_rows(str(section.file), required=("question", "answer"))
    for number, row in enumerate(rows, 1):
        if not isinstance(row["answer"], bool):
            raise DataError(
                f"{section.file}: row {number}: 'answer' is {row['answer']!r}, wanted true or false"
            )
    if len(rows) <= section.shots:
        raise DataError(
            f"{section.file}: {len(rows)} rows, wanted more than the {section.shots} shots"
        )
    return rows


def _of_file(tokenizer: Any, section: JudgementSection) -> tuple[list[Question], list[Question]]:
    found = []
    for row in check_file(section):
        text = f"Question: {row['question']}\nAnswer:"
        found.append(Question(tokenizer.encode(text, add_special_tokens=False), row["answer"]))
    return found[: section.shots], found[section.shots :][: section.items]


def _made(
    tokenizer: Any,
    texts: Texts,
    split: Split,
    count: int,
    piece: int,
    generator: np.random.Generator,
) -> list[Question]:
    first = tokenizer.encode("First: ", add_special_tokens=False)
    second = tokenizer.encode("\nSecond: ", add_special_tokens=False)
    asked = tokenizer.encode("\nThe second follows the first:", add_special_tokens=False)
    long = [
        [ids for ids in texts.documents(split, category) if len(ids) >= 2 * piece]
        for category in range(len(texts.categories))
    ]
    # A no needs a second text of the category.
    usable = [documents for documents in long if len(documents) > 1]
    found: list[Question] = []
    while usable and len(found) < count:
        documents = usable[generator.integers(len(usable))]
        one, other = generator.choice(len(documents), 2, replace=False)
        answer = len(found) % 2 == 0
        start = int(generator.integers(len(documents[one]) - 2 * piece + 1))
        head = documents[one][start : start + piece]
        tail = documents[one][start + piece : start + 2 * piece]
        if not answer:
            there = int(generator.integers(len(documents[other]) - piece + 1))
            tail = documents[other][there : there + piece]
        found.append(Question([*first, *head.tolist(), *second, *tail.tolist(), *asked], answer))
    return found
