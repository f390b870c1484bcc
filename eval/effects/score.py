"""Score the demo's held-out tasks without generating: the same answers from one forward.

Greedy decoding gives exactly the answer if the model, given the answer as input, ranks each of its
tokens first and then ends. Multiple choice compares the choices' log-likelihoods.

Shape legend: B rows, S positions, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval.effects.probe import IGNORED, padded_batches
from moe_finetune.io.rows import read_rows
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.perturbation import Perturbation

Row = dict[str, list[int]]


class HeldOutTasks:
    """The demo's arithmetic, code and prose tasks, tokenized once.

    Args:
        data: folder of :func:`eval.demo.rows.write_rows`.
        tokenizer: the checkpoint's.
        limit: largest number of code and of prose passages; all arithmetic problems are used.
    """

    def __init__(self, data: Path, tokenizer: Any, limit: int):
        self._arithmetic = answer_rows(tokenizer, read_rows(data / "arithmetic_test.jsonl"))
        self._cloze: dict[str, list[tuple[list[Row], int]]] = {
            domain: [
                (
                    [_row(tokenizer, item["question"], f" {c}") for c in item["choices"]],
                    item["answer"],
                )
                for item in read_rows(data / f"{domain}_test.jsonl")[:limit]
            ]
            for domain in ("code", "prose")
        }

    def score(self, model: nn.Module, perturbation: Perturbation | None = None) -> dict[str, float]:
        """Share of right answers in each task, and their ``mean``; no recorder may be installed."""
        scores = {"arithmetic": share_exact(model, self._arithmetic, perturbation)}
        with _measured(model, perturbation):
            for domain, items in self._cloze.items():
                rows = [row for choices, _ in items for row in choices]
                sums = iter([total for _, total in _answers(model, rows)])
                right = 0
                for choices, answer in items:
                    values = [next(sums) for _ in choices]
                    right += values.index(max(values)) == answer
                scores[domain] = right / len(items)
        return {**scores, "mean": sum(scores.values()) / len(scores)}


def answer_rows(tokenizer: Any, items: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of ``question``, ``answer`` and end of text, with labels on the last two."""
    end = tokenizer.eos_token_id
    return [_row(tokenizer, item["question"], f" {item['answer']}", end) for item in items]


def share_exact(
    model: nn.Module, rows: Sequence[Row], perturbation: Perturbation | None = None
) -> float:
    """Share of ``rows`` whose labels greedy decoding gives; no recorder may be installed."""
    with _measured(model, perturbation):
        return sum(right for right, _ in _answers(model, rows)) / len(rows)


@contextmanager
def _measured(model: nn.Module, perturbation: Perturbation | None) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), Recorder(model, perturbation=perturbation):
            yield
    finally:
        model.train(was_training)


def _answers(model: nn.Module, rows: Sequence[Row]) -> list[tuple[bool, float]]:
    """For each row, whether greedy decoding gives the answer, and its log-likelihood."""
    # Rows of similar length share a batch, to limit padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    answers: list[tuple[bool, float]] = []
    ends = torch.tensor(model.generation_config.eos_token_id).flatten()  # type: ignore[union-attr]
    for batch in padded_batches([rows[i] for i in order]):
        targets_BS = batch.pop("labels")[:, 1:]
        logits_BSV = model(**batch, use_cache=False).logits[:, :-1].float()
        answers += _judge(logits_BSV, targets_BS, ends)
    return [answer for _, answer in sorted(zip(order, answers, strict=True))]


def _judge(logits_BSV: Tensor, targets_BS: Tensor, ends: Tensor) -> list[tuple[bool, float]]:
    learned_BS = targets_BS != IGNORED
    targets_N = targets_BS[learned_BS]
    logs_NV = logits_BSV[learned_BS].log_softmax(-1)
    greedy_N = logs_NV.argmax(-1)
    # Decoding ends with any of the end tokens.
    ended_N = torch.isin(greedy_N, ends) & torch.isin(targets_N, ends)
    right_N = (greedy_N == targets_N) | ended_N
    logs_N = logs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    sizes = learned_BS.sum(1).tolist()
    return [
        (bool(right.all()), float(logs.sum()))
        for right, logs in zip(right_N.split(sizes), logs_N.split(sizes), strict=True)
    ]


def _row(tokenizer: Any, prompt: str, answer: str, *end: int) -> Row:
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), *end]
    return {
        "input_ids": prompt_ids + answer_ids,
        "labels": [IGNORED] * len(prompt_ids) + answer_ids,
    }
