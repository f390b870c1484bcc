"""The suite that asks every arm, such as P3's Table 2: checked at the start, then evaluated.

``acc`` compares sums of log-probabilities, which fall with every token, so the answers of a
question must have as many tokens (``はい`` and ``いいえ`` have not).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.evaluation.engine import definitions, evaluate
from moe_finetune.evaluation.results import load_samples
from moe_finetune.evaluation.suite_lines import ready_lines
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.models.tokenizer import Tokenizer

JUDGEMENT = "local_judgement"
"""The template of such questions."""


def suite_key(suite: str) -> dict[str, Any]:
    """What decides the questions and their scores."""
    return definitions(load_suite(suite), None, None)


def check_answers(suite: str, tokenizer: Tokenizer) -> None:
    """Refuse questions of :data:`JUDGEMENT` whose answers differ in their number of tokens."""
    judged = [line for line in ready_lines(load_suite(suite)) if line.entry.template == JUDGEMENT]
    for line in judged:
        (leaf,) = line.leaves  # a template's line is one task
        for split, rows in line.rows(leaf).items():
            for number, row in enumerate(rows, 1):
                counts = [
                    len(tokenizer.encode(f" {choice}", add_special_tokens=False))
                    for choice in row["choices"]
                ]
                if len(set(counts)) > 1:
                    raise DataError(
                        f"{leaf.files[split]}: row {number}: its answers have "
                        f"{' and '.join(map(str, counts))} tokens with this tokenizer, so the "
                        "shorter would be favored; write answers of as many tokens"
                    )


def judge(folder: Path, suite: str, dtype: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """Scores of a checkpoint by the suite's labels: ``value``, ``stderr``, ``n``, ``categories``.

    ``categories`` has the sum of the scores and the number of questions of each ``category`` that
    the rows name.
    """
    results = evaluate(folder, suite, "hf", scratch / "eval", dtype=dtype, progress=False)
    scores: dict[str, dict[str, Any]] = {}
    for label, task in results["tasks"].items():
        categories: dict[str, list[float]] = {}
        for row in load_samples(scratch / "eval", task):
            if "category" in row["doc"] and row["filter"] == task["filter"]:
                counts = categories.setdefault(row["doc"]["category"], [0, 0])
                counts[0] += row["metrics"][task["metric"]]
                counts[1] += 1
        shown = {key: task.get(key) for key in ("value", "stderr", "n")}
        scores[label] = {**shown, "categories": categories}
    return scores
