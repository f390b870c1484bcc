"""Sums over tokens, and the metrics that follow from them: the one accumulator of all readers.

The log has one group, a page one per domain, a bootstrap one per sequence.

G are groups, B replicates, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.special import entr

from moe_finetune.losses.gram import cosines
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics.coherence import coherence_barrier
from moe_finetune.metrics.routing import of_load, of_mean_probability, of_scores

WIDE = ("load", "score", "probability")
CHOICES = ("tokens", "load")
SCORES = ("score", "square", "score_entropy")
PROBABILITIES = ("probability", "entropy")
COSINES = ("activation_cosine", "output_cosine", "mutual_coherence", "below_barrier")
NEEDS = frozenset({"activations_gram", "outputs_gram"})
"""Parts of a record that :data:`COSINES` read."""


class Sums:
    """Float64 sums by group of tokens, MoE layer and column, on the device of each layer's tokens.

    Nothing is copied to the host before a metric is asked for, so a GPU never waits for it.

    Args:
        layers: decoder indices of the MoE layers.
        columns: what is summed, among ``CHOICES``, ``SCORES``, ``PROBABILITIES``, ``COSINES`` and
            ``coupling_mass``, for which a forward's layers must be added in order.
    """

    def __init__(
        self, layers: Sequence[int], num_experts: int, columns: Sequence[str], groups: int = 1
    ):
        self.layers, self.num_experts, self.groups = list(layers), num_experts, groups
        self.columns = tuple(columns)
        self._spans: dict[str, slice] = {}
        self.width = 0
        for name in self.columns:
            size = num_experts if name in WIDE else 1
            self._spans[name] = slice(self.width, self.width + size)
            self.width += size
        self._rows: dict[int, Tensor] = {}  # (G, W) by row
        self._lower: RoutingRecord | None = None

    def add(
        self, record: RoutingRecord, group_T: Tensor | None = None, at_T: Tensor | None = None
    ) -> None:
        """Add the tokens of a layer that count, or those at the positions ``at_T``.

        ``group_T`` has a group for each token of the record, or of ``at_T``; None: group 0.
        """
        row = self.layers.index(record.layer)
        values = {n: VALUES[n](record) for n in self.columns if n in VALUES}
        if "coupling_mass" in self.columns:
            if row and self._lower is not None:
                values["coupling_mass"] = coupling_mass(self._lower, record)
            self._lower = record
        if at_T is not None:
            values = {name: value[at_T] for name, value in values.items()}
        chosen: Any = slice(None) if at_T is None else at_T
        self.add_values(
            row,
            record.index_TK[chosen],
            record.scores_TK[chosen] if "score" in self.columns else None,
            values,
            group_T,
            record.mask_T if at_T is None else None,
        )

    def add_values(
        self,
        row: int,
        index_TK: Tensor,
        scores_TK: Tensor | None,
        values: dict[str, Tensor],
        group_T: Tensor | None = None,
        mask_T: Tensor | None = None,
    ) -> None:
        """Add tokens by their selected experts and scores, and values ``(T,)`` or ``(T, E)``."""
        sums_GW = self._row(row, index_TK.device)
        ones_T = torch.ones(len(index_TK), dtype=sums_GW.dtype, device=sums_GW.device)
        counted_T = ones_T if mask_T is None else mask_T.to(sums_GW.dtype)
        values = {"tokens": counted_T, **values}
        flat_X, index_TK = sums_GW.view(-1), index_TK.long()
        if group_T is not None:
            index_TK = index_TK + group_T.long()[:, None] * self.width
        for name, of_choice in (
            ("load", counted_T[:, None].expand(index_TK.shape)),
            ("score", scores_TK),
        ):
            if of_choice is not None and name in self._spans:
                # A group's columns follow those of the one before it.
                columns_X = flat_X[self._spans[name].start :]
                wide_TK = _wide(of_choice, sums_GW, None if name == "load" else mask_T)
                columns_X.scatter_add_(0, index_TK.reshape(-1), wide_TK.reshape(-1))
        for name, value in values.items():
            wide_TX = _wide(value[:, None] if value.dim() == 1 else value, sums_GW, mask_T)
            span_GX = sums_GW[:, self._spans[name]]
            if group_T is None:
                span_GX[0] += wide_TX.sum(0)
            else:
                span_GX.index_add_(0, group_T.long(), wide_TX)

    def _row(self, row: int, device: torch.device) -> Tensor:
        if row not in self._rows:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._rows[row] = torch.zeros(self.groups, self.width, dtype=dtype, device=device)
        return self._rows[row]

    @property
    def device(self) -> torch.device | None:
        """Where the first layer's sums lie; None before anything was added."""
        return next((sums.device for sums in self._rows.values()), None)

    def tensor(self, device: torch.device) -> Tensor:
        """All sums ``(G, L, W)`` on one device, zeros where nothing was added."""
        rows = [self._row(row, device).to(device) for row in range(len(self.layers))]
        return torch.stack(rows, dim=1)

    def array(self) -> np.ndarray:
        """All sums ``(G, L, W)`` on the host."""
        return self.tensor(torch.device("cpu")).numpy()

    def column(self, sums: np.ndarray, name: str) -> np.ndarray:
        """A column of sums ``(..., L, W)``: ``(..., L, E)`` or ``(..., L)``."""
        part = sums[..., self._spans[name]]
        return part if name in WIDE else part[..., 0]

    def load_LE(self) -> np.ndarray:
        """Dispatches of all groups, int64."""
        return self.column(self.array().sum(0), "load").astype(np.int64)

    def weighted(self, weights_BG: np.ndarray) -> dict[str, np.ndarray]:
        """:meth:`metrics` of replicates that have each group so many times."""
        sums_GLW = self.array()
        flat_BX = weights_BG @ sums_GLW.reshape(len(sums_GLW), -1)
        return self.metrics(flat_BX.reshape(-1, *sums_GLW.shape[1:]))

    def metrics(self, sums: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Metrics by name, ``(..., L)`` each, of sums ``(..., L, W)``; None: of all groups.

        Those of columns that were not summed are absent.
        """
        if sums is None:
            sums = self.array().sum(0)
        metrics: dict[str, np.ndarray] = {}
        tokens = np.maximum(self.column(sums, "tokens"), 1)
        mean = {n: self.column(sums, n) / (tokens[..., None] if n in WIDE else tokens)
                for n in self.columns if n not in CHOICES}  # fmt: skip
        metrics["max_violation"] = of_load(self.column(sums, "load"))
        if "score" in mean:
            metrics |= of_scores(
                mean.pop("score"), mean.pop("square"), mean.pop("score_entropy", None)
            )
        if "probability" in mean:
            metrics["routing_variance"] = of_mean_probability(mean.pop("probability"))
        return metrics | mean


def _wide(values: Tensor, like: Tensor, mask_T: Tensor | None) -> Tensor:
    """Values in the dtype of the sums, 0 in rows that do not count, where they may be NaN."""
    values = values.detach().to(like.dtype)
    if mask_T is None:
        return values
    return values.masked_fill(~mask_T.view(-1, *(1,) * (values.dim() - 1)), 0.0)


def as_double(tensor: Tensor) -> Tensor:
    """The tensor in float64, which MPS lacks."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def squared_cosine(gram_TKK: Tensor) -> Tensor:
    """Mean squared cosine ``(T,)`` over ordered pairs of a token's vectors (P1 Table 1)."""
    width = gram_TKK.shape[-1]
    return cosines(gram_TKK).square().sum((-1, -2)) / max(width * (width - 1), 1)


def largest_cosine(gram_TKK: Tensor) -> Tensor:
    """Mutual coherence ``(T,)`` of each token's vectors (P4 def. 5.2)."""
    return cosines(gram_TKK).abs().amax((-1, -2)).clamp(max=1.0)


def coupling_mass(lower: RoutingRecord, upper: RoutingRecord) -> Tensor:
    """Minus P1's coupling (eq. 6) of each token ``(T,)``, as ``coupling_loss`` averages it."""
    picked_T = lower.distribution_TE.gather(-1, lower.index_TK).sum(-1)
    top_k = upper.index_TK.shape[-1]
    return picked_T * upper.distribution_TE.topk(top_k, sorted=False).values.sum(-1)


def _outputs(record: RoutingRecord) -> Tensor:
    assert record.outputs_gram_TKK is not None
    return record.outputs_gram_TKK


def _activations(record: RoutingRecord) -> Tensor:
    assert record.activations_gram_TKK is not None
    return record.activations_gram_TKK


def _below(record: RoutingRecord) -> Tensor:
    barrier = coherence_barrier(record.index_TK.shape[-1])
    return largest_cosine(as_double(_outputs(record))) < barrier


VALUES: dict[str, Callable[[RoutingRecord], Tensor]] = {
    "square": lambda record: as_double(record.scores_TK).square().sum(-1),
    "score_entropy": lambda record: entr(as_double(record.scores_TK)).sum(-1),
    "probability": lambda record: record.distribution_TE,
    "entropy": lambda record: entr(record.distribution_TE).sum(-1),
    "activation_cosine": lambda record: squared_cosine(as_double(_activations(record))),
    "output_cosine": lambda record: squared_cosine(as_double(_outputs(record))),
    "mutual_coherence": lambda record: largest_cosine(as_double(_outputs(record))),
    "below_barrier": _below,
}
"""What a column sums, by token."""
