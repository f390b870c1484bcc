"""What one forward of the model carries from its start to its layers.

The backbone's pre-hook makes one object per forward and hands it down in the layers' keyword
arguments. Gradient checkpointing binds those arguments, so a layer that is run again in the
backward meets the same object: nothing is looked up on the model, in a thread or in a stack, which
would be wrong with two forwards before one backward or with a backward in another thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
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

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        train: bool,
        observe: bool,
        scale: float,
        labels: Tensor | None,
        count_labels: bool,
    ) -> ForwardContext:
        """The context of a call of the backbone with these arguments.

        Args:
            labels: (B, L), those that the model above was called with.
            count_labels: tokens count that predict a label; else those that attention sees.

        Raises:
            CaptureError: the call has no tokens, or has no labels that it needs.
        """
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeddings = kwargs.get("inputs_embeds")
        shaped = ids if ids is not None else embeddings[..., 0] if embeddings is not None else None
        if shaped is None:
            raise CaptureError("the model was called with neither input_ids nor inputs_embeds")
        if count_labels:
            mask_T = _predicting(labels)
        else:
            mask_T = _attended(shaped, kwargs.get("attention_mask"))
        return cls(
            train=train,
            observe=observe,
            scale=scale,
            mask_T=mask_T,
            token_ids_T=None if ids is None else ids.reshape(-1),
            sequence_lengths=_sequence_lengths(shaped, kwargs),
        )

    @property
    def wanted(self) -> bool:
        """Whether any layer has to hand over a record."""
        return self.train or self.observe


def _predicting(labels_BL: Tensor | None) -> Tensor:
    if labels_BL is None:
        raise CaptureError(
            "method.token_mask: labels needs the model to be called with labels, and this "
            "trainer does not pass them; use token_mask: attention"
        )
    # The token at t predicts label t+1; the last one predicts nothing.
    shifted = torch.nn.functional.pad(labels_BL[:, 1:], (0, 1), value=-100)
    return (shifted != -100).reshape(-1)


def _attended(shaped_BL: Tensor, attention: Tensor | None) -> Tensor:
    if torch.is_tensor(attention) and attention.shape == shaped_BL.shape:
        return attention.reshape(-1) != 0
    return torch.ones(shaped_BL.numel(), dtype=torch.bool, device=shaped_BL.device)


def _sequence_lengths(shaped: Tensor, kwargs: dict) -> Tensor | None:
    """Tokens of each sequence in the flattened batch: rows, or runs of packed positions."""
    rows, length = shaped.shape[0], shaped.shape[1]
    positions = kwargs.get("position_ids")
    unmasked = kwargs.get("attention_mask") is None
    if unmasked and positions is not None and positions.shape == (rows, length):
        flat = positions.reshape(-1)
        starts = (flat == 0).nonzero().squeeze(1)
        if starts.numel() == 0 or int(starts[0]) != 0:
            starts = torch.cat([starts.new_zeros(1), starts])
        ends = torch.cat([starts[1:], starts.new_tensor([flat.numel()])])
        return ends - starts
    return torch.full((rows,), length, device=shaped.device)
