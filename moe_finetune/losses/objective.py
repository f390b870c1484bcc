"""The weighted sum of loss terms, evaluated inside one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor, distributed

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import TERMS, LayerContext, ModelFacts, Need, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import distributed_run
from moe_finetune.torch_extension import is_fake

_FOUND = "strength."
"""Prefix of the state's keys for weights found for shares."""


@dataclass
class LayerLoss:
    """The objective in one layer, by term.

    Attributes:
        losses: unweighted values with their graphs.
        factors: multiplier of each at this step; 0 for a share whose weight is not found yet, or at
            the end of a schedule.
        at_one: the multipliers at weight 1.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    at_one: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Tensor]:
        """The unweighted values, detached."""
        return {name: loss.detach() for name, loss in self.losses.items()}

    @property
    def weighted(self) -> dict[str, Tensor]:
        """The weighted losses with their graphs, of the terms that act."""
        return {n: loss * self.factors[n] for n, loss in self.losses.items() if self.factors[n]}

    @property
    def total(self) -> Tensor | None:
        """The weighted sum, or None when no term acts."""
        terms = list(self.weighted.values())
        return reduce(add, terms) if terms else None


class Objective:
    """Loss terms, their weights at the current step, and the layers each applies to.

    ``terms`` are validated options by name, as a resolved method has them.

    Attributes:
        full_weights: each term's weight before its schedule; None for a share until it is found.
        weights: the weights at this step.
    """

    def __init__(self, terms: Mapping[str, TermOptions], facts: ModelFacts):
        self.terms = tuple(TERMS[name](options) for name, options in terms.items())
        self.facts = facts
        for term in self.terms:
            term.check(facts)
        self._layers = {
            term.name: sum(term.applies(layer) for layer in term.layers(facts))
            for term in self.terms
        }
        self.full_weights: dict[str, float | None] = {
            term.name: term.options.weight for term in self.terms
        }
        self.weights: dict[str, float] = {}
        self._progress = (0, 1)
        self.set_progress(0, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """Everything the terms read in addition to the router's tensors."""
        return frozenset().union(*(term.needs for term in self.terms))

    def needs_of(self, layer: int) -> frozenset[Need]:
        """What the terms of decoder layer ``layer`` read."""
        return frozenset().union(*(term.needs for term in self.terms if term.applies(layer)))

    def set_progress(self, step: int, total_steps: int) -> None:
        self._progress = (step, total_steps)
        self.weights = {
            term.name: (self.full_weights[term.name] or 0.0)
            * term.options.schedule.factor(step, total_steps)
            for term in self.terms
        }

    def set_full_weight(self, name: str, weight: float | None) -> None:
        """Set the weight found for a term's share; its schedule continues."""
        self.full_weights[name] = weight
        self.set_progress(*self._progress)

    def __call__(self, record: RoutingRecord, context: LayerContext) -> LayerLoss:
        result = LayerLoss()
        for term in self.terms:
            if not term.applies(record.layer):
                continue
            value = term.loss(record, context)
            if value is None:
                continue
            if term.options.share is None and self.full_weights[term.name] is None:
                self._find_weight(term, record, value.detach())
            layers = self._layers[term.name] if term.options.layers_reduction == "mean" else 1
            result.losses[term.name] = value
            result.factors[term.name] = self.weights[term.name] / layers
            result.at_one[term.name] = 1 / layers
        return result

    def _find_weight(self, term: Term, record: RoutingRecord, value: Tensor) -> None:
        """Set a term's first weight, equal on all ranks."""
        if value.is_meta or is_fake(value):  # planning memory has no values
            return
        with torch.no_grad():
            weight = term.first_weight(record, _mean_over_ranks(value))
        weight = float(_mean_over_ranks(value.new_tensor(weight, dtype=torch.float64)))
        if not 0 < weight < math.inf:
            raise ObjectiveError(
                f"method.terms.{term.name}: its first weight is {weight:g}, found from a value of "
                f"{float(value):g}; give a weight instead"
            )
        self.set_full_weight(term.name, weight)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights that training finds, as ``strength.<term>``; 0 until found."""
        return {
            f"{_FOUND}{term.name}": torch.tensor(
                self.full_weights[term.name] or 0.0, dtype=torch.float64
            )
            for term in self.terms
            if term.options.finds_weight
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for term in self.terms:
            if term.options.finds_weight:
                self.set_full_weight(term.name, float(state[f"{_FOUND}{term.name}"]) or None)


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not distributed_run():
        return value
    value = value.clone()
    distributed.all_reduce(value, op=distributed.ReduceOp.SUM)
    return value / distributed.get_world_size()
