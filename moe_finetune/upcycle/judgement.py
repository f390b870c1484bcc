"""Few-shot yes-or-no questions (P3 Table 2), answered by the likelier of two words.

A file's rows have ``question`` and ``answer``, and may have a ``category``. Without a file the
questions are made from texts: two consecutive pieces of a text (yes), or pieces of two texts of one
category (no). Examples come from the training texts, questions from the test texts.

A prompt and its answer are tokenized together, with the tokenizer's usual prefix; an answer is
scored from the token at which the two continuations differ.

The two words may have different numbers of tokens (``はい`` and ``いいえ``), and a sum of
log-probabilities falls with every token. So the mean per token decides, similar to
lm-evaluation-harness's normalization by length. The answer by sums is also reported; it is the same
for words of equal length. The wording of the prompts is ours: the paper does not print its prompts.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.errors import DataError
from moe_finetune.upcycle.texts import opening_ids

if TYPE_CHECKING:
    from moe_finetune.upcycle.schema import JudgementSection
    from moe_finetune.upcycle.texts import Split, Texts

log = logging.getLogger(__name__)

SEED = 20
REPLACED = "\N{REPLACEMENT CHARACTER}"
DRAWS = 100
"""Draws of pieces for each generated question, until one is valid text."""


@dataclass(frozen=True)
class Prompts:
    """The text around a question in one language; ``answers`` are (no, yes)."""

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
    """A question without its answer, whether the answer is yes, and its category if known."""

    text: str
    answer: bool
    category: str | None = None


def judge(model: Any, tokenizer: Any, texts: Texts, section: JudgementSection) -> dict[str, Any]:
    """Accuracy over the questions: ``accuracy``, ``stderr``, ``count``, ``yes`` (share of yes).

    An answer's score is the mean of its tokens' log-probabilities; a tie is a no. Also returned are
    ``accuracy_of_sums``, ``answer_tokens`` (of the first question's no and yes), and
    ``categories``: right answers and questions of each category.
    """
    import torch

    solved, test_questions = questions(tokenizer, texts, section)
    answers = PROMPTS[section.language].answers
    prompt = "".join(f"{solution.text}{answers[solution.answer]}\n\n" for solution in solved)
    answer_tokens: list[int] = []
    right = said_yes = right_by_sum = 0
    categories: dict[str, list[int]] = {}
    device = next(model.parameters()).device
    with torch.no_grad():
        for question in test_questions:
            start, continued = _continuations(tokenizer, prompt + question.text, answers)
            lengths = [len(ids) - start for ids in continued]
            answer_tokens = answer_tokens or lengths
            scores = []
            for ids, length in zip(continued, lengths, strict=True):
                ids_S = torch.tensor(ids, device=device)
                logits_SV = model(
                    input_ids=ids_S[None], use_cache=False, logits_to_keep=length + 1
                ).logits[0, :-1]
                chosen_S = ids_S[start:, None]
                scores.append(float(logits_SV.float().log_softmax(-1).gather(1, chosen_S).sum()))
            no_mean, yes_mean = (
                score / length for score, length in zip(scores, lengths, strict=True)
            )
            yes = yes_mean > no_mean
            said_yes += yes
            right += yes == question.answer
            right_by_sum += (scores[1] > scores[0]) == question.answer
            if question.category is not None:
                counts = categories.setdefault(question.category, [0, 0])
                counts[0] += yes == question.answer
                counts[1] += 1
    count = len(test_questions)
    accuracy = right / count
    return {
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "count": count,
        "yes": said_yes / count,
        "shots": len(solved),
        "accuracy_of_sums": right_by_sum / count,
        "answer_tokens": answer_tokens,
        "categories": categories,
    }


def _continuations(
    tokenizer: Any, context: str, answers: tuple[str, str]
) -> tuple[int, list[list[int]]]:
    """Ids of the context with each answer, and the position where the answers begin.

    A tokenizer may merge the answer's beginning with the context's end; the position is then before
    that token.
    """
    opening = opening_ids(tokenizer)
    continued = [
        opening + tokenizer.encode(context + answer, add_special_tokens=False) for answer in answers
    ]
    context_ids = opening + tokenizer.encode(context, add_special_tokens=False)
    common = takewhile(lambda ids: len(set(ids)) == 1, zip(context_ids, *continued, strict=False))
    return len(list(common)), continued


def questions(
    tokenizer: Any, texts: Texts, section: JudgementSection
) -> tuple[list[Question], list[Question]]:
    """Examples and questions; answers alternate in generated ones, so chance is one half."""
    if section.file is not None:
        return _questions_of_file(section)
    generator = np.random.default_rng(SEED)
    solved = _questions_of_texts(tokenizer, texts, "train", section.shots, section, generator)
    test_questions = _questions_of_texts(
        tokenizer, texts, "test", section.items, section, generator
    )
    if len(solved) < section.shots or not test_questions:
        raise DataError(
            f"evaluation.judgement: the texts are too short for pieces of {section.piece} tokens; "
            "lower evaluation.judgement.piece, or set evaluation.judgement: null"
        )
    return solved, test_questions


def check_file(section: JudgementSection) -> list[dict[str, Any]]:
    """Read the recipe's file of questions."""
    from moe_finetune.io.rows import read_rows

    rows = read_rows(str(section.file), required=("question", "answer"))
    for row_number, row in enumerate(rows, 1):
        if not isinstance(row["answer"], bool):
            raise DataError(
                f"{section.file}: row {row_number}: 'answer' is {row['answer']!r}; it must be true "
                "or false"
            )
        if not isinstance(row.get("category", ""), str):
            raise DataError(
                f"{section.file}: row {row_number}: 'category' is {row['category']!r}, not text"
            )
    if len(rows) <= section.shots:
        raise DataError(
            f"{section.file}: {len(rows)} rows; it needs more than the {section.shots} shots"
        )
    return rows


def _questions_of_file(section: JudgementSection) -> tuple[list[Question], list[Question]]:
    pattern = PROMPTS[section.language].question
    from_file = [
        Question(pattern.format(question=row["question"]), row["answer"], row.get("category"))
        for row in check_file(section)
    ]
    solved, test_questions = from_file[: section.shots], from_file[section.shots :]
    if len(test_questions) > section.items:
        log.warning(
            "%s: only the first %d of %d questions are used; raise evaluation.judgement.items "
            "to use all",
            section.file,
            section.items,
            len(test_questions),
        )
    return solved, test_questions[: section.items]


def _questions_of_texts(
    tokenizer: Any,
    texts: Texts,
    split: Split,
    count: int,
    section: JudgementSection,
    generator: np.random.Generator,
) -> list[Question]:
    prompts, piece = PROMPTS[section.language], section.piece
    long = []
    for category, name in enumerate(texts.categories):
        numbers = texts.numbers(split, category)
        # The special ids of a text, at most two, do not count.
        long.append((name, numbers[texts.lengths_T[numbers] >= 2 * piece + 2]))
    # A no needs a second text of the category.
    usable = [(name, numbers) for name, numbers in long if len(numbers) > 1]
    made_questions: list[Question] = []
    for _ in range(DRAWS * count if usable else 0):
        if len(made_questions) == count:
            break
        name, numbers = usable[generator.integers(len(usable))]
        pair = texts.ids(generator.choice(numbers, 2, replace=False))
        one, other = (ids[~np.isin(ids, tokenizer.all_special_ids)] for ids in pair)
        if len(one) < 2 * piece or len(other) < piece:
            continue
        answer = len(made_questions) % 2 == 0
        start = int(generator.integers(len(one) - 2 * piece + 1))
        pieces = [one[start : start + piece], one[start + piece : start + 2 * piece]]
        if not answer:
            other_start = int(generator.integers(len(other) - piece + 1))
            pieces[1] = other[other_start : other_start + piece]
        head, tail = (tokenizer.decode(ids) for ids in pieces)
        if REPLACED in head + tail:  # a piece begins or ends inside a character
            continue
        text = prompts.first + head + prompts.second + tail + prompts.follows
        made_questions.append(Question(text, answer, name))
    return made_questions
