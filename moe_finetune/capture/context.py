"""What one forward of the model carries from its start to its layers.

The backbone's pre-hook makes one object per forward and hands it down in the layers' keyword
arguments. Gradient checkpointing binds those arguments, so a layer that is run again in the
backward meets the same object: nothing is looked up on the model, in a thread or in a stack, which
would be wrong with two forwards before one backward or with a backward in another thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_finetune.losses.base import PreviousLayer

CONTEXT_KEY = "moe_finetune_context"


@dataclass(eq=False)
class ForwardContext:
    """Decided once, before the first layer; layers only read it.

    Attributes:
        train: the objective is evaluated and injected (training mode and gradients enabled).
        observe: records are handed to the recorder's observers.
        scale: factor of the injected loss, 1 / (micro-batches of this optimizer step).
        mask_T: bool, True where a token counts.
        token_ids_T: input ids, None with embeddings.
        sequence_lengths: tokens of each sequence; sums to T.
        previous: per MoE layer, what it leaves for the next one.
        seen: layers that were counted; a recomputation finds its layer here.
        draws: per layer, random numbers that a recomputation must meet again.
    """

    train: bool
    observe: bool
    scale: float
    mask_T: Tensor
    token_ids_T: Tensor | None
    sequence_lengths: Tensor | None
    previous: dict[int, PreviousLayer] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    draws: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """Whether any layer has to hand over a record."""
        return self.train or self.observe
