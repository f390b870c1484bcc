"""Batches of the demo's pretraining: rows of code, of prose and of arithmetic.

Text rows are random windows of the domain's documents. Arithmetic rows are whole problems laid end
to end, of which only the answers are learned: operands are random, and predicting them would drown
the few tokens that depend on the rest. Positions restart at each document, which keeps documents
from attending to each other; without that, arithmetic is learned many times more slowly.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.demo.arithmetic import base_problem, equation, task_problem
from eval.demo.text import Document, Domain

IGNORED = -100
PROBLEMS_AT_ONCE = 2000


@dataclass(frozen=True)
class Mixture:
    """What a batch is made of.

    Attributes:
        code_rows: rows of standard-library source.
        prose_rows: rows of documentation.
        arithmetic_rows: rows of problems.
        length: tokens a row.
        equations: share of problems that are bare calculations.
        task_wordings: share of word problems in the held-out task's wordings.
        small: share of problems with one-digit addends.
    """

    code_rows: int = 5
    prose_rows: int = 3
    arithmetic_rows: int = 16
    length: int = 128
    equations: float = 0.6
    task_wordings: float = 0.05
    small: float = 0.2

    @property
    def text_rows(self) -> int:
        """The rows that come first in a batch and are learned in full."""
        return self.code_rows + self.prose_rows


def batches(
    documents: Sequence[Document], tokenizer: Any, mixture: Mixture, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless ``(input_ids_BS, labels_BS, positions_BS)``, int64.

    A label belongs to its own position; :data:`IGNORED` ones are not learned.
    """
    windows = np.random.default_rng(seed)
    counts: dict[Domain, int] = {"code": mixture.code_rows, "prose": mixture.prose_rows}
    streams = {domain: _stream(documents, domain, tokenizer) for domain in counts}
    problems = _problem_rows(tokenizer, mixture, random.Random(seed))
    while True:
        ids, labels = [], []
        for domain, rows in counts.items():
            stream = streams[domain]
            for start in windows.integers(0, len(stream) - mixture.length, rows):
                ids.append(stream[start : start + mixture.length])
                labels.append(ids[-1])
        for _ in range(mixture.arithmetic_rows):
            row, answers = next(problems)
            ids.append(row)
            labels.append(answers)
        positions_BS = positions_of(np.stack(ids), tokenizer.eos_token_id)
        yield (
            torch.from_numpy(np.stack(ids)),
            torch.from_numpy(np.stack(labels)),
            torch.from_numpy(positions_BS),
        )


def draw_problem(rng: random.Random, mixture: Mixture) -> tuple[str, str]:
    """Prompt and answer of one problem of the mixture, on a training fact."""
    if rng.random() < mixture.equations:
        problem = equation(rng, mixture.small)
        return problem.question, f" {problem.answer}"
    if rng.random() < mixture.task_wordings:
        problem = task_problem(rng, held_out=False)
    else:
        problem = base_problem(rng, held_out=False, small_share=mixture.small)
    return problem.prompt, f" {problem.answer}"


def _stream(documents: Sequence[Document], domain: Domain, tokenizer: Any) -> np.ndarray:
    texts = [d.text for d in documents if d.domain == domain and d.split == "pretrain"]
    end = tokenizer.eos_token_id
    parts = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return np.array([token for part in parts for token in (*part.ids, end)], dtype=np.int64)


def positions_of(ids_BS: np.ndarray, end: int) -> np.ndarray:
    """Positions that start at 0 in every row and after every ``end`` token."""
    place_BS = np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
    starts_BS = np.zeros_like(ids_BS)
    starts_BS[:, 1:] = np.where(ids_BS[:, :-1] == end, place_BS[:, 1:], 0)
    return place_BS - np.maximum.accumulate(starts_BS, axis=1)


def _problem_rows(
    tokenizer: Any, mixture: Mixture, rng: random.Random
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of whole problems; what is left at the end of a row is padding."""
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    ids: list[int] = []
    labels: list[int] = []
    while True:
        drawn = [draw_problem(rng, mixture) for _ in range(PROBLEMS_AT_ONCE)]
        prompts = encode([prompt for prompt, _ in drawn])
        answers = encode([answer for _, answer in drawn])
        for prompt, answer in zip(prompts, answers, strict=True):
            reply = [*answer.ids, tokenizer.eos_token_id]
            size = len(prompt.ids) + len(reply)
            if size > mixture.length:
                raise ValueError(f"length={mixture.length} is too short for a problem of {size}")
            if len(ids) + size > mixture.length:
                padding = mixture.length - len(ids)
                yield (
                    np.array(ids + [tokenizer.pad_token_id] * padding),
                    np.array(labels + [IGNORED] * padding),
                )
                ids, labels = [], []
            ids += [*prompt.ids, *reply]
            labels += [*[IGNORED] * len(prompt.ids), *reply]
