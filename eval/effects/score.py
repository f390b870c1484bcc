"""Scores on the demo's held-out tasks without generating: the same answers from one forward.

Greedy decoding gives exactly the answer when, fed the answer, the model ranks each of its tokens
first and then ends. Multiple choice compares the choices' log-likelihoods.

Shape legend: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval.effects.probe import IGNORED, padded_batches
from moe_finetune.demo.data import ARITHMETIC_FILE, CLOZE_FILES
from moe_finetune.io.rows import read_log
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.perturbation import Perturbation

Row = dict[str, list[int]]


class HeldOutTasks:
    """The demo's arithmetic, code and prose tasks, tokenized once.

    Args:
        data: folder of :func:`moe_finetune.demo.data.write_demo_data`.
        tokenizer: the checkpoint's.
        limit: most passages of code and of prose; arithmetic is short, and all of it is asked.
    """

    def __init__(self, data: Path, tokenizer: Any, limit: int):
        self.stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
        self._arithmetic: list[Row] = []
        for item in _read(data / ARITHMETIC_FILE):
            row = _row(tokenizer, item["question"], f" {item['answer']}", tokenizer.eos_token_id)
            self._arithmetic.append(row)
        self._cloze: dict[str, list[tuple[list[Row], int]]] = {
            domain: [
                (
                    [_row(tokenizer, item["question"], f" {c}") for c in item["choices"]],
                    item["answer"],
                )
                for item in _read(data / name)[:limit]
            ]
            for domain, name in CLOZE_FILES.items()
        }

    def score(self, model: nn.Module, perturbation: Perturbation | None = None) -> dict[str, float]:
        """Share of right answers of each task, and their ``mean``; nothing may record the model."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), Recorder(model, perturbation=perturbation):
                exact = [right for right, _ in self._answers(model, self._arithmetic)]
                scores = {"arithmetic": sum(exact) / len(exact)}
                for domain, items in self._cloze.items():
                    rows = [row for choices, _ in items for row in choices]
                    sums = iter([value for _, value in self._answers(model, rows)])
                    right = 0
                    for choices, answer in items:
                        values = [next(sums) for _ in choices]
                        right += values.index(max(values)) == answer
                    scores[domain] = right / len(items)
        finally:
            model.train(was_training)
        return {**scores, "mean": sum(scores.values()) / len(scores)}

    def _answers(self, model: nn.Module, rows: Sequence[Row]) -> list[tuple[bool, float]]:
        """Whether greedy decoding gives each row's answer, and the answer's log-likelihood."""
        # Rows of like length share a batch, so that little of it is padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        found: list[tuple[bool, float]] = []
        for batch in padded_batches([rows[i] for i in order]):
            targets_BS = batch.pop("labels")[:, 1:]
            logits_BSV = model(**batch, use_cache=False).logits[:, :-1].float()
            found += self._judge(logits_BSV, targets_BS)
        return [answer for _, answer in sorted(zip(order, found, strict=True))]

    def _judge(self, logits_BSV: Tensor, targets_BS: Tensor) -> list[tuple[bool, float]]:
        judged = []
        for logits_SV, targets_S in zip(logits_BSV, targets_BS, strict=True):
            at = targets_S != IGNORED
            answer_N, logs_NV = targets_S[at], logits_SV[at].log_softmax(-1)
            greedy = logs_NV.argmax(-1).tolist()
            wanted = answer_N.tolist()
            same = all(
                got == want or {got, want} <= self.stops
                for got, want in zip(greedy, wanted, strict=True)
            )
            total = logs_NV.gather(1, answer_N.unsqueeze(1)).sum().item()
            judged.append((same, total))
        return judged


def _row(tokenizer: Any, prompt: str, answer: str, *end: int) -> Row:
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = [*tokenizer.encode(answer, add_special_tokens=False), *end]
    return {"input_ids": before + after, "labels": [IGNORED] * len(before) + after}


def _read(path: Path) -> list[dict[str, Any]]:
    return read_log(path)
