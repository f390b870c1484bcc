"""Base classes of loss terms: options, what a term reads from a layer's record, and its value."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.registry import Registry

Need = Literal[
    "activations_gram", "outputs_gram", "activations", "outputs", "previous", "expert_factors"
]

LARGEST_WEIGHT = 1e12
"""Largest weight: squared gradients must fit into float32."""


class Schedule(BaseModel):
    """How a term's weight changes during training: constant, linear warm-up, or cosine to 0."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the weight moves"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps from 0 to the weight")

    def factor(self, step: int, total_steps: int) -> float:
        """Multiplier of the weight at optimizer step ``step`` (0-based)."""
        if self.kind == "constant":
            return 1.0
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "linear":
            return 1.0
        if total_steps <= self.warmup_steps:
            return 1.0
        progress = (step - self.warmup_steps) / (total_steps - self.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


class TermOptions(BaseModel):
    """Options of every term; a subclass adds a term's own.

    A term's strength is its ``weight``, or its ``share``: its gradient norm divided by the language
    loss's. Training finds the weight for a share at its start (and again every ``every`` steps). A
    weight next to a share records what an earlier run found and is not used, except that 0 removes
    the term.

    A weight multiplies the mean over tokens: for a paper's sum over a batch, give the paper's
    weight times that batch's tokens.
    """

    model_config = ConfigDict(extra="forbid")

    weight: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="factor of the loss; 0 removes it"
    )
    share: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="instead of a weight: its gradient norm divided by that of the trainer's loss",
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="number of steps after which the weight for a share is measured again",
    )
    layers_reduction: Literal["sum", "mean"] = Field(
        default="sum", description="how the layers' values are combined"
    )
    layers: Literal["all"] | list[int | str] = Field(
        default="all", description='`all`, or a list such as `[4, "8-20"]`'
    )
    schedule: Schedule = Schedule()

    finds_first_weight: ClassVar[bool] = False
    """Whether :meth:`Term.first_weight` gives the weight where the options have none."""

    @field_validator("layers")
    @classmethod
    def _ranges(cls, value: Any) -> Any:
        if value != "all" and not expand_layers(value):
            raise ValueError("layers: an empty list selects no layer; weight 0 removes a term")
        return value

    @model_validator(mode="after")
    def _strength(self) -> Self:
        if self.weight is None and not self.finds_weight:
            raise ValueError("weight is missing; give a weight, or a share such as 0.1")
        if self.share is not None and self.weight:
            self.weight = None
        if (self.weight or 0.0) > LARGEST_WEIGHT:
            raise ValueError(
                f"weight: {self.weight:g} is more than {LARGEST_WEIGHT:g}, where float32 gradients "
                "overflow; lower it"
            )
        if self.every is not None and self.share is None:
            raise ValueError("every: is only valid with a share; set share, or remove every")
        return self

    @property
    def finds_weight(self) -> bool:
        """Whether training finds the weight, from a share or in the first forward."""
        return self.share is not None or (self.finds_first_weight and self.weight is None)

    @property
    def removed(self) -> bool:
        """Whether the term is switched off: weight 0."""
        return self.weight == 0

    def selects(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` carries this term."""
        return self.layers == "all" or layer in expand_layers(self.layers)


def expand_layers(entries: list[int | str]) -> set[int]:
    """``[4, "8-10"]`` -> ``{4, 8, 9, 10}``; raise ValueError for anything else."""
    layers: set[int] = set()
    for entry in entries:
        first, dash, last = str(entry).partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"layers: '{entry}' is neither a layer nor a range such as 8-20")
        span = range(int(first), int(last if dash else first) + 1)
        if not span:
            raise ValueError(f"layers: the range '{entry}' is empty")
        layers.update(span)
    return layers


@dataclass(frozen=True)
class PreviousLayer:
    """What terms on two layers read from the lower one."""

    layer: int
    distribution_TE: Tensor
    index_TK: Tensor


@dataclass
class LayerContext:
    """The context in which a term is evaluated in one layer.

    Attributes:
        previous: the MoE layer below, or None in the first one.
        draws: what a recomputation must reuse of this forward: random numbers, and choices that
            rounding could change; by name.
    """

    previous: PreviousLayer | None = None
    draws: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` returned in the first visit."""
        if name not in self.draws:
            self.draws[name] = make()
        return self.draws[name]


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that terms are checked against before training."""

    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    vocab_size: int
    has_gate: bool = True
    shared_input_space: bool = True
    """Whether router and experts read vectors from the same space."""
    fixed_layers: tuple[int, ...] = ()
    """MoE layers whose experts are looked up by token, so training cannot change the selection."""

    @property
    def selecting_layers(self) -> tuple[int, ...]:
        """MoE layers whose router selects."""
        return tuple(layer for layer in self.moe_layers if layer not in self.fixed_layers)


class Term(ABC):
    """One loss term. ``trains`` names the parts of its own layer that its gradient reaches."""

    name: ClassVar[str]
    source: ClassVar[str]
    reads: ClassVar[str]
    trains: frozenset[Literal["router", "experts"]]
    needs: frozenset[Need] = frozenset()
    """Parts of the record that it reads in addition to the router's."""
    Options: ClassVar[type[TermOptions]] = TermOptions
    below: ClassVar[bool] = True
    """Whether its gradient also flows into the layer's input, and so into what lies below."""
    selection: ClassVar[bool] = False
    """Whether it acts on the selection: skipped in layers that look experts up by token."""

    def __init__(self, options: TermOptions):
        self.options = options
        self._left_out: frozenset[int] = frozenset()

    @classmethod
    def parts(cls, options: Any) -> frozenset[Literal["router", "experts"]]:
        """``trains`` of a term with these options."""
        return cls.trains

    def applies(self, layer: int) -> bool:
        return layer not in self._left_out and self.options.selects(layer)

    @abstractmethod
    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor | None:
        """The unweighted float32 scalar for this layer, or None if the term has no value here.

        A loss over tokens is their mean.
        """

    def first_weight(self, record: RoutingRecord, value: Tensor) -> float:
        """The weight, where the options have none and set ``finds_first_weight``.

        Asked once, in the first layer that has a value in a run's first training forward; it holds
        for all layers and is saved in checkpoints. ``value`` is detached, and its mean over ranks;
        ranks take the mean of their weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no first_weight")

    def layers(self, facts: ModelFacts) -> tuple[int, ...]:
        """Layers in which the term has a value, counted for ``layers_reduction: mean``."""
        return facts.moe_layers

    def check(self, facts: ModelFacts) -> None:
        """Raise ObjectiveError if this term cannot be computed for the model."""
        if self.options.layers != "all":
            unknown = expand_layers(self.options.layers) - set(facts.moe_layers)
            if unknown:
                raise ObjectiveError(
                    f"method.terms.{self.name}.layers: {sorted(unknown)} are not MoE layers of "
                    f"this model; its MoE layers are {list(facts.moe_layers)}"
                )
        if self.selection:
            self._leave_out(facts)

    def _leave_out(self, facts: ModelFacts) -> None:
        self._left_out = frozenset(facts.fixed_layers)
        chosen = self.options.layers
        selected = set(facts.moe_layers) if chosen == "all" else expand_layers(chosen)
        fixed = sorted(selected & self._left_out)
        if fixed and (chosen != "all" or len(fixed) == len(selected)):
            raise ObjectiveError(
                f"method.terms.{self.name} acts on the selection of experts, but layers {fixed} "
                "of this model look experts up by token; choose other layers, or remove the "
                "term (weight: 0)"
            )


def _problem(name: str, value: object) -> str | None:
    if not (isinstance(value, type) and issubclass(value, Term)) or inspect.isabstract(value):
        return f"is {value!r:.80}, and must be a subclass of moe_finetune.losses.base.Term"
    if getattr(value, "name", None) != name:
        return f"its class has the name {getattr(value, 'name', None)!r}; both names must be equal"
    return None


TERMS: Registry[type[Term]] = Registry("loss term", ObjectiveError, _problem)
