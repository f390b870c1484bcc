"""The log-probabilities that a server should answer, computed by transformers on this machine.

Shape legend: S positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.errors import EvaluationError
from moe_finetune.moe.recorder.observe import undisturbed
from moe_finetune.served.client import Answer

ROOM = 0.9
"""Share of the free memory that a float32 model may take."""


@dataclass(frozen=True)
class Scores:
    """A model's view of an answer's tokens.

    Attributes:
        logprobs: natural logarithms of ``answer.ids[answer.first:]``; float64.
        greedy: the likeliest token at each of these positions, and the one after the last.
    """

    logprobs: np.ndarray
    greedy: list[int]


def open_reference(folder: str | Path) -> Checkpoint:
    """Open a checkpoint, unless its model in float32 does not fit into this machine's memory."""
    checkpoint = open_checkpoint(folder, values=True, stored=True)
    bytes_needed = 4 * sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values())
    free = psutil.virtual_memory().available
    if bytes_needed > ROOM * free:
        raise EvaluationError(
            f"{checkpoint.folder}: the model in float32 takes {bytes_needed / 2**30:.0f} GiB, and "
            f"{free / 2**30:.0f} GiB are free; compare with a second server instead: --reference "
            "URL, and --reference-base URL for its base"
        )
    return checkpoint


def score(
    checkpoint: Checkpoint,
    answers: Sequence[Answer],
    adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Scores]:
    """Score each answer's tokens by the checkpoint's model, with ``adapter`` in PEFT if given."""
    model: Any = load_model(checkpoint, dtype=dtype)
    if adapter is not None:
        model = with_adapter(model, open_adapter(adapter, checkpoint))
    with undisturbed(model):
        return [_scored(model, answer) for answer in answers]


def _scored(model: Any, answer: Answer) -> Scores:
    size = model.get_input_embeddings().weight.shape[0]
    if unknown := [token for token in answer.ids if not 0 <= token < size]:
        raise EvaluationError(
            f"token {unknown[0]} is not in the model's vocabulary of {size}, so the server has "
            "another model, or another tokenizer; check which one it loaded"
        )
    ids = torch.tensor([answer.ids], device=model.device)
    logits_SV = model(input_ids=ids, use_cache=False).logits[0, answer.first - 1 :].double()
    logprobs_SV = logits_SV[:-1].log_softmax(-1)
    chosen_S = torch.tensor(answer.ids[answer.first :], device=model.device)
    values_S = logprobs_SV.gather(1, chosen_S[:, None])[:, 0]
    return Scores(values_S.cpu().numpy(), logits_SV.argmax(-1).tolist())
