"""Sums over tokens for routing metrics, gathered in one pass over a trace.

Sums can be added over chunks, over the tokens of a sequence or domain, and over a bootstrap's
resampled sequences. Every array may have leading axes (groups G, replicates B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from moe_finetune.metrics.arrays import entropy

if TYPE_CHECKING:
    from moe_finetune.routing.trace import RoutingTrace, TraceChunk

STEP_ELEMENTS = 2_000_000


@dataclass(frozen=True)
class RoutingSums:
    """Sums over the tokens of each group; ``None`` if the trace lacks the data.

    Attributes:
        tokens: ``(...)`` tokens.
        load_LE: ``(..., L, E)`` dispatches.
        score_LE: ``(..., L, E)`` sum of top-k scores (renormalized to 1 per token).
        square_L: ``(..., L)`` sum of squared top-k scores.
        entropy_L: ``(..., L)`` sum of the entropies of top-k scores, nats.
        prob_LE: ``(..., L, E)`` sum of full probabilities.
        prob_entropy_L: ``(..., L)`` sum of their entropies.
    """

    tokens: np.ndarray
    load_LE: np.ndarray
    score_LE: np.ndarray | None = None
    square_L: np.ndarray | None = None
    entropy_L: np.ndarray | None = None
    prob_LE: np.ndarray | None = None
    prob_entropy_L: np.ndarray | None = None

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> RoutingSums:
        return RoutingSums(
            *(None if value is None else change(value) for value in self._values())  # type: ignore[arg-type]
        )

    def total(self) -> RoutingSums:
        return self.map(lambda array: array.sum(0))

    def weighted(self, weights_BG: np.ndarray) -> RoutingSums:
        """Sum groups with weights ``(B, G)``: how often each replicate contains each group."""
        return self.map(
            lambda array: (weights_BG @ array.reshape(len(array), -1)).reshape(
                len(weights_BG), *array.shape[1:]
            )
        )

    def _values(self) -> list[np.ndarray | None]:
        return [getattr(self, field.name) for field in fields(self)]


def gather(
    trace: RoutingTrace,
    groups: Callable[[TraceChunk], np.ndarray],
    num_groups: int,
    field: str,
    visit: Callable[[TraceChunk], None] = lambda chunk: None,
) -> RoutingSums:
    """Sum a trace per group; ``groups`` maps a chunk (that has ``field``) to ``(T,)`` numbers.

    ``visit`` is called with every chunk (with ``ids``), to save a second pass.

    Chunks are processed in slices, with a few hundred MB at most.
    """
    info = trace.info
    shape = (num_groups, len(info.layers), info.num_experts)
    rows = shape[:2]
    sums = RoutingSums(
        np.zeros(num_groups, np.int64),
        np.zeros(shape, np.int64),
        *(np.zeros(size) if trace.has("weights") else None for size in (shape, rows, rows)),
        *(np.zeros(size) if trace.has("probs") else None for size in (shape, rows)),
    )
    fields = [name for name in ("ids", "weights", "probs") if trace.has(name)]
    for chunk in trace.chunks(*fields, field):
        visit(chunk)
        for part in _slices(
            chunk, len(info.layers) * (info.num_experts if trace.has("probs") else info.top_k)
        ):
            _add(sums, groups(part), part)
    return sums


def routing_metrics(sums: RoutingSums) -> dict[str, np.ndarray]:
    """Metrics per layer, ``(..., L)`` each; defined by the functions of the same names.

    ``score_entropy`` is :func:`routing_entropy` of top-k scores. A metric is absent if its sums
    are.
    """
    load = sums.load_LE.astype(np.float64)
    mean = load.mean(-1)
    metrics = {"max_violation": (load.max(-1) - mean) / np.maximum(mean, 1e-12)}
    tokens = np.maximum(sums.tokens, 1)[..., None]
    if sums.score_LE is not None and sums.square_L is not None:
        mean_LE = sums.score_LE / tokens[..., None]
        squares = (mean_LE**2).sum(-1)
        # mean_t (s - mean s)^2 = mean_t s^2 - (mean s)^2, summed over experts.
        metrics["score_variance"] = (sums.square_L / tokens - squares) / mean_LE.shape[-1]
        if sums.entropy_L is not None:
            marginal = entropy(mean_LE)
            metrics["score_entropy"] = sums.entropy_L / tokens
            metrics["expert_entropy"] = marginal
            metrics["mutual_information"] = marginal - metrics["score_entropy"]
            metrics["collision_entropy"] = -np.log(squares)
    if sums.prob_LE is not None:
        mean_LE = sums.prob_LE / tokens[..., None]
        metrics["routing_variance"] = ((mean_LE - 1 / mean_LE.shape[-1]) ** 2).mean(-1)
    if sums.prob_entropy_L is not None:
        metrics["routing_entropy"] = sums.prob_entropy_L / tokens
    return metrics


def _slices(chunk: TraceChunk, row: int) -> Iterator[TraceChunk]:
    from moe_finetune.routing.trace import TraceChunk

    step = max(1, STEP_ELEMENTS // row)
    for start in range(0, chunk.tokens, step):
        stop = min(start + step, chunk.tokens)
        arrays = {name: array[start:stop] for name, array in chunk.arrays.items()}
        yield TraceChunk(chunk.start + start, stop - start, arrays)


def _add(sums: RoutingSums, group_T: np.ndarray, part: TraceChunk) -> None:
    ids = part["ids"]
    _, layers, experts = sums.load_LE.shape
    # Tokens of a group lie together, so a slice needs the bins of few groups only.
    low, high = int(group_T.min()), int(group_T.max()) + 1
    near = sums.map(lambda array: array[low:high])
    group_T = group_T.astype(np.int64) - low
    rows_TL = group_T[:, None] * layers + np.arange(layers)
    bins_TLK = rows_TL[:, :, None] * experts + ids
    _count(near.tokens, group_T)
    _count(near.load_LE, bins_TLK)
    if near.score_LE is not None and near.square_L is not None and near.entropy_L is not None:
        weights = part["weights"].astype(np.float32)
        totals = weights.sum(-1, keepdims=True)
        scores = weights / np.where(totals > 0, totals, 1)
        _count(near.score_LE, bins_TLK, scores)
        _count(near.square_L, rows_TL, np.einsum("tlk,tlk->tl", scores, scores))
        _count(near.entropy_L, rows_TL, entropy(scores))
    if near.prob_LE is not None and near.prob_entropy_L is not None:
        probs = part["probs"].astype(np.float32)
        probs /= probs.sum(-1, keepdims=True)  # sigmoid scores become a distribution
        _count(near.prob_LE, rows_TL[:, :, None] * experts + np.arange(experts), probs)
        _count(near.prob_entropy_L, rows_TL, entropy(probs))


def _count(total: np.ndarray, bins: np.ndarray, values: np.ndarray | None = None) -> None:
    """Add ``values`` (default 1) to the entries of ``total``, a contiguous view, at ``bins``."""
    weights = None if values is None else values.ravel()
    total.reshape(-1)[:] += np.bincount(bins.ravel(), weights, total.size)
