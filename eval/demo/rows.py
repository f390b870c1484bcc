"""The demo's rows, as files; the same seed gives the same bytes on the same Python.

* ``train.jsonl``, ``validation.jsonl``: ``prompt``, ``completion``, ``domain`` (arithmetic, code,
  prose), from the fine-tuning split and training facts;
* ``arithmetic_test.jsonl``: ``question``, ``answer``: held-out facts, answered by generating;
* ``code_test.jsonl``, ``prose_test.jsonl``: ``question``, ``choices``, ``answer``: how a held-out
  document goes on, among three copies in which two words have changed places, and its index. All
  choices have the same words and length, so that only their order can tell them apart;
* for the other stages, ``preferences.jsonl`` (``prompt``, ``chosen``, ``rejected``: one digit of
  the answer is wrong), ``prompts.jsonl``, ``prompts_test.jsonl`` (held-out facts) and
  ``texts.jsonl`` (``text``: the fine-tuning split's documents).
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.demo.arithmetic import Problem, task_problem
from eval.demo.text import Document, Domain, read_documents

CONTEXT_LINES = 5
NUM_CHOICES = 4
Row = dict[str, Any]


def write_rows(
    folder: Path,
    seed: int = 0,
    train: int = 4000,
    validation: int = 120,
    problems: int = 200,
    passages: int = 100,
    stages: int = 2000,
) -> None:
    """Write all files into ``folder``; the counts are rows a file."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = read_documents()
    used: set[str] = set()
    for name, count in (("train.jsonl", train), ("validation.jsonl", validation)):
        rng = random.Random(f"{seed}/{name}")
        _write(folder / name, finetuning_rows(documents, rng, count, used))
    rng = random.Random(f"{seed}/arithmetic_test.jsonl")
    _write(folder / "arithmetic_test.jsonl", arithmetic_rows(rng, problems))
    domains: tuple[Domain, ...] = ("code", "prose")
    for domain in domains:
        rng = random.Random(f"{seed}/{domain}_test.jsonl")
        heldout = _select(documents, domain, "heldout")
        _write(folder / f"{domain}_test.jsonl", _cloze_rows(heldout, rng, passages))
    _write_stages(folder, random.Random(f"{seed}/stages"), documents, stages)


def finetuning_rows(
    documents: Sequence[Document], rng: random.Random, count: int, used: set[str]
) -> list[Row]:
    """Rows in random order; their prompts are added to ``used``, and none in it is drawn again."""
    rows: list[Row] = []
    by_domain = {name: _select(documents, name, "finetune") for name in ("code", "prose")}
    for i in range(count):
        domain = (None, "code", None, None, "prose", None, None, None)[i % 8]
        while True:
            if domain is None:
                problem = task_problem(rng, held_out=False)
                prompt, completion = problem.prompt, f" {problem.answer}"
            else:
                prompt, completion = draw_cut(by_domain[domain], rng, more_lines=0)
            if prompt not in used:
                break
        used.add(prompt)
        rows.append({"prompt": prompt, "completion": completion, "domain": domain or "arithmetic"})
    rng.shuffle(rows)
    return rows


def arithmetic_rows(rng: random.Random, count: int) -> Iterator[Row]:
    """``count`` different problems on held-out facts: ``question``, ``answer``."""
    seen: set[str] = set()
    while len(seen) < count:
        problem = task_problem(rng, held_out=True)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            yield {"question": problem.prompt, "answer": str(problem.answer)}


def _cloze_rows(documents: list[Document], rng: random.Random, count: int) -> Iterator[Row]:
    seen: set[str] = set()
    while len(seen) < count:
        context, continuation = draw_cut(documents, rng, more_lines=1)
        truth = continuation.strip()  # the task joins question and choice by a space
        if context in seen or len(set(truth.split())) < NUM_CHOICES:
            continue
        seen.add(context)
        choices = [truth]
        while len(choices) < NUM_CHOICES:
            changed = exchange_two_words(truth, rng)
            if changed not in choices:
                choices.append(changed)
        rng.shuffle(choices)
        yield {"question": context, "choices": choices, "answer": choices.index(truth)}


def exchange_two_words(text: str, rng: random.Random) -> str:
    """``text`` with two of its words in each other's place; white space stays where it is."""
    parts = re.split(r"(\s+)", text)
    first, second = rng.sample(range(0, len(parts), 2), 2)
    parts[first], parts[second] = parts[second], parts[first]
    return "".join(parts)


def draw_cut(documents: list[Document], rng: random.Random, more_lines: int) -> tuple[str, str]:
    """A random cut after the first word of a line: the lines before it, and how the text goes on.

    The text goes on to the end of the line and for ``more_lines`` lines.
    """
    while True:
        lines = rng.choice(documents).text.splitlines()
        if len(lines) <= CONTEXT_LINES + more_lines:
            continue
        at = rng.randrange(CONTEXT_LINES, len(lines) - more_lines)
        _, _, line_end = lines[at].lstrip().partition(" ")
        following = lines[at + 1 : at + 1 + more_lines]
        if len(line_end.rstrip()) < 12 or line_end[0] == " ":
            continue
        if not all(line.strip() for line in following):
            continue
        line_start = lines[at].removesuffix(f" {line_end}")
        context = "\n".join([*lines[at - CONTEXT_LINES : at], line_start])
        continuation = "\n".join([" " + line_end, *following])
        if len(context) <= 320 and len(continuation) <= 100 * (1 + more_lines):
            return context, continuation


def _select(documents: Iterable[Document], domain: str, split: str) -> list[Document]:
    return [d for d in documents if d.domain == domain and d.split == split]


def wrong_answer(problem: Problem, rng: random.Random) -> int:
    """An answer with as many digits as the right one, one of them changed."""
    digits = str(problem.answer)
    position = rng.randrange(len(digits))
    others = [d for d in "0123456789" if d != digits[position] and (position or d != "0")]
    return int(digits[:position] + rng.choice(others) + digits[position + 1 :])


def _write_stages(
    folder: Path, rng: random.Random, documents: Sequence[Document], count: int
) -> None:
    problems = [task_problem(rng, held_out=False) for _ in range(count)]
    preferences = [
        {"prompt": p.prompt, "chosen": f" {p.answer}", "rejected": f" {wrong_answer(p, rng)}"}
        for p in problems
    ]
    tests = [task_problem(rng, held_out=True) for _ in range(count // 10)]
    _write(folder / "preferences.jsonl", preferences)
    for name, drawn in (("prompts", problems), ("prompts_test", tests)):
        rows = [{"prompt": p.prompt, "answer": str(p.answer)} for p in drawn]
        _write(folder / f"{name}.jsonl", rows)
    texts = [{"text": d.text} for d in documents if d.split == "finetune"]
    _write(folder / "texts.jsonl", texts)


def _write(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")
