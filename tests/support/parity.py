"""Whether two backends give the same answers to the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.evaluation.backends import Backend, open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.results import load_samples
from moe_finetune.evaluation.suites import Suite


@dataclass
class Parity:
    """One task under two backends.

    Attributes:
        task: the suite's label; ``n`` its items.
        equal_answers: items with the same choice (log-likelihood) or text (generation).
        largest_difference: between the backends' log-probabilities, in nats; None for generation.
        differing: the first few items that differ: doc_id and both answers.
    """

    task: str
    n: int
    first: str
    second: str
    equal_prompts: int
    equal_answers: int
    largest_difference: float | None
    differing: list[dict[str, Any]]

    @property
    def holds(self) -> bool:
        return self.equal_prompts == self.equal_answers == self.n


def parity(
    checkpoint: str | Path,
    backends: Sequence[str] = ("vllm", "hf"),
    suite: str | Path | Suite = "demo",
    output: str | Path = "parity",
    n: int = 200,
    opened: Mapping[str, Backend] | None = None,
    dtype: str = "float32",
) -> list[Parity]:
    """Evaluate the first ``n`` items of each task on each backend and compare with the first one.

    Float32 by default; in lower precision near ties can go either way.
    """
    output = Path(output)
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for kind in backends:
        backend_open = (opened or {}).get(kind)
        backend = backend_open or open_backend(checkpoint, kind, dtype=dtype)
        try:
            results = evaluate(checkpoint, suite, kind, output / kind, limit=n, opened=backend)
        finally:
            if backend_open is None:
                backend.close()
        samples[kind] = {
            name: load_samples(output / kind, task) for name, task in results["tasks"].items()
        }
    first, *others = backends
    return [
        _compare(task, first, samples[first][task], other, samples[other][task])
        for other in others
        for task in samples[first]
    ]


def _compare(
    task: str,
    first: str,
    first_rows: list[dict[str, Any]],
    second: str,
    second_rows: list[dict[str, Any]],
) -> Parity:
    largest: float | None = None
    prompts = answers = 0
    differing: list[dict[str, Any]] = []
    for a, b in zip(first_rows, second_rows, strict=True):
        prompts += a["prompt_sha256"] == b["prompt_sha256"]
        values = _answer(a), _answer(b)
        if isinstance(a["replies"][0][0], list):
            for x, y in zip(a["replies"], b["replies"], strict=True):
                largest = max(largest or 0.0, abs(x[0][0] - y[0][0]))
        if values[0] == values[1]:
            answers += 1
        elif len(differing) < 5:
            differing.append({"doc_id": a["doc_id"], first: values[0], second: values[1]})
    return Parity(task, len(first_rows), first, second, prompts, answers, largest, differing)


def _answer(row: dict[str, Any]) -> Any:
    replies = [reply[0] for reply in row["replies"]]
    if isinstance(replies[0], list):
        return max(range(len(replies)), key=lambda i: replies[i][0])
    return replies
