"""The context that one forward carries from the backbone to its layers.

The backbone's pre-hook makes one object per forward and passes it in the layers' keyword arguments.
Gradient checkpointing binds those arguments, so a layer that runs again in the backward gets the
same object. Looking it up on the model, in a thread or on a stack would be wrong with two forwards
before one backward or with a backward in another thread.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from moe_finetune.losses.base import PreviousLayer
from moe_finetune.losses.inject import Joins
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.experts.dense_router import DenseRouter
from moe_finetune.moe.packed_sequences import Sequences
from moe_finetune.moe.tokens import Tokens

CONTEXT_KEY = "moe_finetune_context"

Observer = Callable[[RoutingRecord, LayerLoss], None]

Route = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(layer, logits_TE, weights_TK, index_TK)`` -> the weights and index that the experts get."""


@dataclass(frozen=True)
class ForwardOverrides:
    """What a trainer adds to the inputs of one forward.

    ``route`` reads or replaces each router's selection, after the bias, at every visit of a layer.
    """

    route: Route | None = None


@dataclass(frozen=True)
class ForwardPlan:
    """What a recorder does in the next forwards; each forward keeps the plan it started with.

    Attributes:
        objective: loss terms to inject in training, or None.
        observers: called once per layer and forward with the record and the layer's loss.
        needs: parts of the record that observers read in addition to the router's tensors.
        observe: "train" records only training forwards, "all" every forward.
        token_mask: which tokens count: "attention", or "labels" (tokens trained on).
        scale: returns the factor of the injected loss, 1 / (micro-batches of this optimizer step).
        joins: how losses join the layers' outputs; None injects their sum.
        overrides: called with a forward's number of rows; returns its ForwardOverrides.
        dense_router: gives routers the gradient of all experts in training forwards, or None.
        keeps_choice: whether a checkpointed layer that runs again takes its first visit's experts.
        note_repeated: called when a layer runs again, with the number of tokens (float64) for which
            it would select other experts, and of all tokens.
    """

    objective: Objective | None = None
    observers: tuple[Observer, ...] = ()
    needs: frozenset[str] = frozenset()
    observe: Literal["train", "all"] = "train"
    token_mask: Literal["attention", "labels"] = "attention"
    scale: Callable[[], float] = lambda: 1.0
    joins: Joins | None = None
    overrides: Callable[[int], ForwardOverrides] = lambda rows: ForwardOverrides()
    dense_router: DenseRouter | None = None
    keeps_choice: bool = True
    note_repeated: Callable[[Tensor, int], None] = lambda changed, tokens: None


class ForwardContext:
    """The state of one forward, decided before the first layer.

    Neither a dataclass nor a container: FSDP2 and other wrappers rebuild those on the way to a
    layer, and a copy would lose what other layers stored.

    Attributes:
        plan: the objective, observers and per-term losses of this forward.
        train: whether the objective is evaluated and injected (training mode with gradients).
        observe: whether the recorder's observers get records.
        scale: factor of the injected loss, 1 / (micro-batches of this optimizer step).
        tokens: which tokens count, and their sequences; None if no layer needs a record.
        overrides: the trainer's additions to this forward.
        sequences: sequences of packed rows if the family's modules need them, else None.
        packed: whether rows contain several sequences.
        checkpoints: whether any decoder layer runs again in the backward.
        dense_router: the plan's in a training forward, else None.
        draw: what the draws of unselected experts in this forward depend on.
        choices: per layer that has run, its selected experts (T, K), kept for its recomputation as
            long as the forward's graph lives; None where nothing runs again.
        previous: per MoE layer, what it reads of the MoE layer below.
        seen: layers already counted; a recomputed layer is in this set.
        draws: per layer, random numbers that a recomputation must reuse.
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
        checkpoints: bool = False,
        training: bool = False,
    ):
        self.plan = plan
        self.train = train
        self.observe = observe
        self.scale = scale
        self.tokens = tokens
        self.overrides = overrides or ForwardOverrides()
        self.sequences = sequences
        self.packed = packed
        self.checkpoints = checkpoints
        self.dense_router = plan.dense_router if training else None
        # Asked once: a recomputation in the backward must draw the same experts.
        self.draw = () if self.dense_router is None else self.dense_router.draw()
        self.choices: dict[int, Tensor | None] = {}
        self.previous: dict[int, PreviousLayer] = {}
        self.seen: set[int] = set()
        self.draws: dict[int, dict[str, Tensor]] = {}
        self._made = weakref.ref(self)

    @property
    def wanted(self) -> bool:
        """Whether any layer needs to make a record."""
        return self.train or self.observe

    @property
    def copied(self) -> bool:
        """Whether this is a copy of the object that the backbone's hook made."""
        return self._made() is not self
