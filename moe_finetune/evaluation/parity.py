"""Compare the answers of two backends to the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.backends import Backend, open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.results import load_samples
from moe_finetune.evaluation.suites import Suite
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import to_json

_SERVER_ONLY = ("base_url", "model")


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
    data_dir: str | Path | None = None,
    opened: Mapping[str, Backend] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> list[Parity]:
    """Evaluate the first ``n`` items of each task on each backend and compare with the first one.

    Args:
        backends: two or more of ``"vllm"``, ``"hf"``, ``"server"``.
        suite: tasks to evaluate; should have a log-likelihood and a generation task.
        output: folder for each backend's results and ``parity.json``.
        n: items per task.
        data_dir: see :func:`moe_finetune.evaluation.engine.evaluate`.
        dtype: float32 by default; in lower precision near ties can go either way.
        options: for :func:`moe_finetune.evaluation.backends.open_backend`.

    Raises:
        EvaluationError: fewer than two backends, or an error of :func:`evaluate`.
    """
    if len(set(backends)) < 2:
        raise EvaluationError("parity needs two different backends")
    output = Path(output)
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for kind in backends:
        backend_open = (opened or {}).get(kind)
        named = {k: v for k, v in options.items() if kind == "server" or k not in _SERVER_ONLY}
        backend = backend_open or open_backend(checkpoint, kind, dtype=dtype, **named)
        try:
            results = evaluate(
                checkpoint, suite, kind, output / kind, data_dir, limit=n, opened=backend
            )
        finally:
            if backend_open is None:
                backend.close()
        samples[kind] = {
            name: load_samples(output / kind, task) for name, task in results["tasks"].items()
        }
    first, *others = backends
    comparisons = [
        _compare(task, first, samples[first][task], other, samples[other][task])
        for other in others
        for task in samples[first]
    ]
    write_atomic(output / "parity.json", to_json([asdict(p) for p in comparisons], 1) + "\n")
    return comparisons


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
