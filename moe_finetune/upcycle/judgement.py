"""Yes-or-no questions after solved ones (P3 Table 2), answered by the likelier of two words.

A file's rows have ``question`` and ``answer``, and may have a ``category``. Without a file the
questions are made from texts: two pieces of a text that follow each other (yes), or a piece and one
of another text of the same category (no). Solved questions come from the training texts, asked ones
from the test texts.

The two words may be of different numbers of tokens (``はい`` and ``いいえ``), and a sum of
log-probabilities falls with every token. The mean per token is compared, as lm-evaluation-harness
does by length; what sums would have said is kept beside it, and equals it where the words are of
equal length. The prompts are in our own words: the paper's are not known here.
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

SEED = 20


@dataclass(frozen=True)
class Prompts:
    """What surrounds a question in one language; ``answers`` are no and yes."""

    answers: tuple[str, str]
    question: str
    first: str
    second: str
    follows: str


PROMPTS: dict[str, Prompts] = {
    "en": Prompts(
        answers=(" no", " yes"),
        question="Question: {question}\nAnswer:",
        first="First: ",
        second="\nSecond: ",
        follows="\nThe second follows the first:",
    ),
    "ja": Prompts(
        answers=("いいえ", "はい"),
        question="質問：{question}\n答え：",
        first="前半：",
        second="\n後半：",
        follows="\n後半は前半の続きですか：",
    ),
}


@dataclass(frozen=True)
class Question:
    """Token ids of a question up to its answer, whether that is yes, and its category if known."""

    ids: list[int]
    answer: bool
    category: str | None = None


def judge(model: Any, tokenizer: Any, texts: Texts, section: JudgementSection) -> dict[str, Any]:
    """Accuracy over the questions: ``accuracy``, ``stderr``, ``count``, ``yes`` (share of yes).

    An answer's score is the mean of its tokens' log-probabilities; a tie is a no. With them are
    ``accuracy_of_sums``, ``answer_tokens`` (of no and yes), and ``categories``: right answers and
    questions of each category.

    Raises:
        DataError: a file without questions for both shots and test, or with other fields.
    """
    import torch

    solved, asked = questions(tokenizer, texts, section)
    words = PROMPTS[section.language].answers
    answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in words]
    end = tokenizer.encode("\n\n", add_special_tokens=False)
    prompt: list[int] = []
    for question in solved:
        prompt += question.ids + answers[question.answer] + end
    right = said_yes = right_by_sum = 0
    categories: dict[str, list[int]] = {}
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
            no_mean, yes_mean = (
                score / len(answer) for score, answer in zip(scores, answers, strict=True)
            )
            yes = yes_mean > no_mean
            said_yes += yes
            right += yes == question.answer
            right_by_sum += (scores[1] > scores[0]) == question.answer
            if question.category is not None:
                held = categories.setdefault(question.category, [0, 0])
                held[0] += yes == question.answer
                held[1] += 1
    count = len(asked)
    accuracy = right / count
    return {
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "count": count,
        "yes": said_yes / count,
        "shots": len(solved),
        "accuracy_of_sums": right_by_sum / count,
        "answer_tokens": [len(answer) for answer in answers],
        "categories": categories,
    }


def questions(
    tokenizer: Any, texts: Texts, section: JudgementSection
) -> tuple[list[Question], list[Question]]:
    """Solved and asked questions; answers alternate in made ones, so chance is one half."""
    if section.file is not None:
        return _of_file(tokenizer, section)
    generator = np.random.default_rng(SEED)
    solved = _made(tokenizer, texts, "train", section.shots, section, generator)
    asked = _made(tokenizer, texts, "test", section.items, section, generator)
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
        if not isinstance(row.get("category", ""), str):
            raise DataError(
                f"{section.file}: row {number}: 'category' is {row['category']!r}, wanted text"
            )
    if len(rows) <= section.shots:
        raise DataError(
            f"{section.file}: {len(rows)} rows, wanted more than the {section.shots} shots"
        )
    return rows


def _of_file(tokenizer: Any, section: JudgementSection) -> tuple[list[Question], list[Question]]:
    found = []
    for row in check_file(section):
        text = PROMPTS[section.language].question.format(question=row["question"])
        ids = tokenizer.encode(text, add_special_tokens=False)
        found.append(Question(ids, row["answer"], row.get("category")))
    return found[: section.shots], found[section.shots :][: section.items]


def _made(
    tokenizer: Any,
    texts: Texts,
    split: Split,
    count: int,
    section: JudgementSection,
    generator: np.random.Generator,
) -> list[Question]:
    prompts, piece = PROMPTS[section.language], section.piece
    first, second, asked = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (prompts.first, prompts.second, prompts.follows)
    )
    long = [
        (name, [ids for ids in texts.documents(split, category) if len(ids) >= 2 * piece])
        for category, name in enumerate(texts.categories)
    ]
    # A no needs a second text of the category.
    usable = [(name, documents) for name, documents in long if len(documents) > 1]
    found: list[Question] = []
    while usable and len(found) < count:
        name, documents = usable[generator.integers(len(usable))]
        one, other = generator.choice(len(documents), 2, replace=False)
        answer = len(found) % 2 == 0
        start = int(generator.integers(len(documents[one]) - 2 * piece + 1))
        head = documents[one][start : start + piece]
        tail = documents[one][start + piece : start + 2 * piece]
        if not answer:
            there = int(generator.integers(len(documents[other]) - piece + 1))
            tail = documents[other][there : there + piece]
        ids = [*first, *head.tolist(), *second, *tail.tolist(), *asked]
        found.append(Question(ids, answer, name))
    return found
