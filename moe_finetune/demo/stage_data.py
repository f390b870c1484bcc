"""The demo's data for the other stages: preferences, prompts and texts.

``write_stage_data(folder, seed)`` writes these files, byte-identical on the same Python:

* from training facts, ``preferences.jsonl`` (``prompt``, ``chosen``, ``rejected``) and
  ``prompts.jsonl`` (``prompt``, ``answer``); a wrong answer has one digit changed;
* from held-out facts, ``prompts_test.jsonl``;
* ``texts.jsonl`` (``text``), the documents that fine-tuning draws on.
"""

import random
from pathlib import Path

from moe_finetune.demo.arithmetic import Problem
from moe_finetune.demo.corpus import read_corpus
from moe_finetune.demo.data import task_problem
from moe_finetune.io.rows import write_jsonl

ROWS, TEST_ROWS = 2000, 200


def wrong_answer(problem: Problem, rng: random.Random) -> int:
    """An answer with as many digits as the right one, one of them changed."""
    digits = str(problem.answer)
    position = rng.randrange(len(digits))
    others = [d for d in "0123456789" if d != digits[position] and (position or d != "0")]
    return int(digits[:position] + rng.choice(others) + digits[position + 1 :])


def write_stage_data(folder: str | Path, seed: int = 0, rows: int = ROWS) -> Path:
    """Write the four files into ``folder``, created if missing, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed}/stages")
    problems = [task_problem(rng, held_out=False) for _ in range(rows)]
    pairs = [(problem, wrong_answer(problem, rng)) for problem in problems]
    write_jsonl(
        folder / "preferences.jsonl",
        (
            {"prompt": p.prompt, "chosen": f" {p.answer}", "rejected": f" {wrong}"}
            for p, wrong in pairs
        ),
    )
    prompts = ({"prompt": p.prompt, "answer": str(p.answer)} for p in problems)
    write_jsonl(folder / "prompts.jsonl", prompts)
    tests = [task_problem(rng, held_out=True) for _ in range(TEST_ROWS)]
    texts = ({"text": d.text} for d in read_corpus() if d.split == "finetune")
    write_jsonl(folder / "texts.jsonl", texts)
    held_out = ({"prompt": p.prompt, "answer": str(p.answer)} for p in tests)
    write_jsonl(folder / "prompts_test.jsonl", held_out)
    return folder
