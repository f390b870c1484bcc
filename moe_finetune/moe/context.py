"""What one forward of the model carries from its start to its layers.

The backbone's pre-hook makes one object per forward and hands it down in the layers' keyword
arguments. Gradient checkpointing binds those arguments, so a layer that is run again in the
backward meets the same object: nothing is looked up on the model, in a thread or in a stack, which
would be wrong with two forwards before one backward or with a backward in another thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from moe_finetune.losses.base import PreviousLayer
from moe_finetune.losses.inject import Joins
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.sequences import Sequences
from moe_finetune.moe.tokens import Tokens

CONTEXT_KEY = "moe_finetune_context"

Observer = Callable[[RoutingRecord, LayerLoss], None]

Route = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(layer, logits_TE, weights_TK, index_TK)`` -> the weights and index that the experts get."""


@dataclass(frozen=True)
class ForwardOverrides:
    """What a trainer adds to the inputs of one forward.

    Attributes:
        route: sees or replaces what each router selected; called last, in every visit of a layer.
        teacher: another model's router logits (T, E), by decoder layer.
    """

    route: Route | None = None
    teacher: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardPlan:
    """What a recorder does in the coming forwards; each forward keeps the plan that it began with.

    Attributes:
        objective: loss terms to inject in training, or None.
        observers: called once per layer and forward with the record and the layer's loss.
        needs: parts of the record that the observers read beyond the router's tensors.
        observe: "train" records only training forwards, "all" every forward.
        token_mask: which tokens count: "attention", or "labels" (those that are trained on).
        scale: returns the injected loss's factor, 1 / (micro-batches of this optimizer step).
        joins: joins the losses to the layers' outputs; None injects their sum.
        overrides: called with the number of rows of a forward.
    """

    objective: Objective | None = None
    observers: tuple[Observer, ...] = ()
    needs: frozenset[str] = frozenset()
    observe: Literal["train", "all"] = "train"
    token_mask: Literal["attention", "labels"] = "attention"
    scale: Callable[[], float] = lambda: 1.0
    joins: Joins | None = None
    overrides: Callable[[int], ForwardOverrides] = lambda rows: ForwardOverrides()


class ForwardContext:
    """Decided once, before the first layer; layers only read it.

    Neither a dataclass nor a container: FSDP2 and other wrappers take those apart on the way to a
    layer and hand over a copy, where nothing of what another layer left is found.

    Attributes:
        plan: the objective, observers and per-term losses of this forward.
        train: the objective is evaluated and injected (training mode and gradients enabled).
        observe: records are handed to the recorder's observers.
        scale: factor of the injected loss, 1 / (micro-batches of this optimizer step).
        tokens: which count, and their sequences; None when no layer has to hand over a record.
        overrides: what a trainer adds to this forward.
        sequences: those of packed rows, where modules of the family need them; else None.
        packed: whether rows have several sequences.
        previous: per MoE layer, what the layer below left for it.
        seen: layers that were counted; a recomputation finds its layer here.
        draws: per layer, random numbers that a recomputation must meet again.
    """

    def __init__(
        self,
        plan: ForwardPlan,
        train: bool,
        observe: bool,
        scale: float,
        tokens: Tokens | None,
        overrides: ForwardOverrides | None = None,
        sequences: Sequences | None = None,
        packed: bool = False,
    ):
        self.plan = plan
        self.train = train
        self.observe = observe
        self.scale = scale
        self.tokens = tokens
        self.overrides = overrides or ForwardOverrides()
        self.sequences = sequences
        self.packed = packed
        self.previous: dict[int, PreviousLayer] = {}
        self.seen: set[int] = set()
        self.draws: dict[int, dict[str, Tensor]] = {}
        self._made = weakref.ref(self)

    @property
    def wanted(self) -> bool:
        """Whether any layer has to hand over a record."""
        return self.train or self.observe

    @property
    def copied(self) -> bool:
        """Whether this is not the object that the backbone made, but a copy of it."""
        return self._made() is not self
