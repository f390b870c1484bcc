"""Sums of a trace on disk, in one pass with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.special import entr

from moe_finetune.routing.sums import CHOICES, PROBABILITIES, SCORES, Sums

if TYPE_CHECKING:
    from moe_finetune.routing.trace import RoutingTrace, TraceChunk

STEP_ELEMENTS = 2_000_000


def gather(
    trace: RoutingTrace,
    groups: Callable[[TraceChunk], np.ndarray],
    num_groups: int,
    field: str,
    visit: Callable[[TraceChunk], None] = lambda chunk: None,
) -> Sums:
    """Sum a trace per group; ``groups`` maps a chunk (that has ``field``) to ``(T,)`` numbers.

    ``visit`` is called with every chunk (with ``ids``), to save a second pass.
    """
    info = trace.info
    columns = (*CHOICES, *(SCORES if trace.has("weights") else ()),
               *(PROBABILITIES if trace.has("probs") else ()))  # fmt: skip
    sums = Sums(info.layers, info.num_experts, columns, num_groups)
    fields = [name for name in ("ids", "weights", "probs") if trace.has(name)]
    for chunk in trace.chunks(*fields, field):
        visit(chunk)
        for part in _slices(chunk, info.num_experts if trace.has("probs") else info.top_k):
            group_T = torch.from_numpy(groups(part).astype(np.int64))
            for row in range(len(info.layers)):
                _add(sums, row, group_T, part)
    return sums


def _slices(chunk: TraceChunk, width: int) -> Iterator[TraceChunk]:
    from moe_finetune.routing.trace import TraceChunk

    step = max(1, STEP_ELEMENTS // width)
    for start in range(0, chunk.tokens, step):
        stop = min(start + step, chunk.tokens)
        arrays = {name: array[start:stop] for name, array in chunk.arrays.items()}
        yield TraceChunk(chunk.start + start, stop - start, arrays)


def _add(sums: Sums, row: int, group_T: torch.Tensor, part: TraceChunk) -> None:
    index_TK = torch.from_numpy(part["ids"][:, row].astype(np.int64))
    scores_TK, values = None, {}
    if "score" in sums.columns:
        weights_TK = torch.from_numpy(part["weights"][:, row].astype(np.float64))
        total_T1 = weights_TK.sum(-1, keepdim=True)
        scores_TK = weights_TK / torch.where(total_T1 > 0, total_T1, 1)
        values = {"square": scores_TK.square().sum(-1), "score_entropy": entr(scores_TK).sum(-1)}
    if "probability" in sums.columns:
        probs_TE = torch.from_numpy(part["probs"][:, row].astype(np.float64))
        probs_TE /= probs_TE.sum(-1, keepdim=True)  # sigmoid scores become a distribution
        values |= {"probability": probs_TE, "entropy": entr(probs_TE).sum(-1)}
    sums.add_values(row, index_TK, scores_TK, values, group_T)
