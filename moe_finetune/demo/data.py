"""The demo's fine-tuning data and held-out tasks, as files.

``write_demo_data(folder, seed)`` writes, the same bytes each time on the same Python:

* ``train.jsonl``, ``validation.jsonl``: ``prompt``, ``completion``, ``domain`` (arithmetic, code,
  prose), from the fine-tuning split and training facts;
* ``arithmetic_test.jsonl``: ``question``, ``answer``: held-out facts, answered by generating;
* ``code_test.jsonl``, ``prose_test.jsonl``: ``question``, ``choices``, ``answer``: how a held-out
  document goes on, among three copies in which two words have changed places, and its index. All
  choices have the same words and length, so that only their order can tell them apart.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.demo.arithmetic import TASK_DIFFERENCES, TASK_SUMS, Problem, word_problem
from moe_finetune.demo.corpus import Document, Domain, read_corpus

TRAIN_FILE, VALIDATION_FILE = "train.jsonl", "validation.jsonl"
ARITHMETIC_FILE = "arithmetic_test.jsonl"
CLOZE_FILES: dict[Domain, str] = {"code": "code_test.jsonl", "prose": "prose_test.jsonl"}

CONTEXT_LINES = 5
NUM_CHOICES = 4


@dataclass(frozen=True)
class DataSizes:
    """Rows of each file; train and validation are split 6:1:1 over arithmetic, code and prose."""

    train: int = 4000
    validation: int = 120
    arithmetic_test: int = 200
    cloze_test: int = 100


@dataclass(frozen=True)
class Cut:
    """A place in a document: the lines before it, and how the text goes on."""

    document: str
    context: str
    continuation: str


def write_demo_data(folder: str | Path, seed: int = 0, sizes: DataSizes | None = None) -> Path:
    """Write the five files into ``folder`` (made when missing) and return it."""
    folder, sizes = Path(folder), sizes or DataSizes()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus()
    used: set[str] = set()
    for name, rows in ((TRAIN_FILE, sizes.train), (VALIDATION_FILE, sizes.validation)):
        rng = random.Random(f"{seed}/{name}")
        _write(folder / name, _finetuning_rows(corpus, rng, rows, used))
    rng = random.Random(f"{seed}/{ARITHMETIC_FILE}")
    _write(folder / ARITHMETIC_FILE, arithmetic_rows(rng, sizes.arithmetic_test))
    for domain, name in CLOZE_FILES.items():
        rng = random.Random(f"{seed}/{name}")
        _write(folder / name, _cloze_rows(corpus, domain, rng, sizes.cloze_test))
    return folder


def task_problem(rng: random.Random, held_out: bool) -> Problem:
    """A problem in the wordings of the fine-tuning data and the held-out task."""
    return word_problem(rng, held_out=held_out, sums=TASK_SUMS, differences=TASK_DIFFERENCES)


def _finetuning_rows(
    corpus: list[Document], rng: random.Random, count: int, used: set[str]
) -> list[dict[str, Any]]:
    """Rows in random order; their prompts are added to ``used``, and none in it is drawn again."""
    rows: list[dict[str, Any]] = []
    by_domain = {domain: _documents(corpus, domain, "finetune") for domain in CLOZE_FILES}
    for i in range(count):
        domain: Domain | None = (None, "code", None, None, "prose", None, None, None)[i % 8]
        while True:
            if domain is None:
                problem = task_problem(rng, held_out=False)
                prompt, completion = problem.prompt, f" {problem.answer}"
            else:
                cut = draw_cut(by_domain[domain], rng, more_lines=0)
                prompt, completion = cut.context, cut.continuation
            if prompt not in used:
                break
        used.add(prompt)
        rows.append({"prompt": prompt, "completion": completion, "domain": domain or "arithmetic"})
    rng.shuffle(rows)
    return rows


def arithmetic_rows(rng: random.Random, count: int) -> Iterable[dict[str, Any]]:
    """``count`` different problems on held-out facts: ``question``, ``answer``."""
    seen: set[str] = set()
    while len(seen) < count:
        problem = task_problem(rng, held_out=True)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            yield {"question": problem.prompt, "answer": str(problem.answer)}


def _cloze_rows(
    corpus: list[Document], domain: Domain, rng: random.Random, count: int
) -> Iterable[dict[str, Any]]:
    documents = _documents(corpus, domain, "heldout")
    seen: set[str] = set()
    while len(seen) < count:
        cut = draw_cut(documents, rng, more_lines=1)
        truth = cut.continuation.strip()  # the task joins question and choice by a space
        if cut.context in seen or len(set(truth.split())) < NUM_CHOICES:
            continue
        seen.add(cut.context)
        choices = [truth]
        while len(choices) < NUM_CHOICES:
            changed = exchange_two_words(truth, rng)
            if changed not in choices:
                choices.append(changed)
        rng.shuffle(choices)
        yield {"question": cut.context, "choices": choices, "answer": choices.index(truth)}


def exchange_two_words(text: str, rng: random.Random) -> str:
    """``text`` with two of its words in each other's place; white space stays where it is."""
    parts = re.split(r"(\s+)", text)
    first, second = rng.sample(range(0, len(parts), 2), 2)
    parts[first], parts[second] = parts[second], parts[first]
    return "".join(parts)


def draw_cut(documents: list[Document], rng: random.Random, more_lines: int) -> Cut:
    """A random cut after the first word of a line; the text goes on for ``more_lines`` lines."""
    while True:
        document = rng.choice(documents)
        lines = document.text.splitlines()
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
            return Cut(document.name, context, continuation)


def _documents(corpus: list[Document], domain: str, split: str) -> list[Document]:
    return [d for d in corpus if d.domain == domain and d.split == split]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")
