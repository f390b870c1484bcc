"""Join auxiliary losses to the graph at a block's output, without changing the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output", Tensor, tuple)


def inject(output: Output, loss: Tensor, scale: float) -> Output:
    """Return ``output`` unchanged; backward through it adds ``scale * d(loss)`` to all gradients.

    Equal to adding ``scale * loss`` to the model's loss, but the loss needs nobody to carry it out
    of the layer, so it works under any trainer and with checkpointed or sharded layers.

    Args:
        output: the block's output; must be part of the graph that is differentiated. Of a tuple
            (GPT-OSS returns its routing weights, too) the first is meant.
        loss: scalar.
        scale: usually 1 / (micro-batches of this optimizer step).
    """
    return _joined(output, None, {"": loss}, scale)


class PerTermLosses:
    """The losses of one forward, by term, whose gradients are taken one term at a time.

    With ``retain_graph`` one forward serves them all, and the trainer's own loss too: a backward
    through the model's output has the losses of the term ``on`` in it alone.

    Attributes:
        on: the term that a backward through the blocks' outputs adds; None adds none.
        losses: each term's loss in each layer, with its graph.
    """

    def __init__(self) -> None:
        self.on: str | None = None
        self.losses: dict[str, list[Tensor]] = {}

    def inject(
        self, output: Output, losses: Mapping[str, Tensor], scale: float, first_visit: bool
    ) -> Output:
        """As :func:`inject` for one layer's ``losses`` by term, none of which acts before ``on``.

        ``first_visit`` is False when a checkpointed layer is run again: its losses are held already
        and get what they need from there.
        """
        if first_visit:
            for name, loss in losses.items():
                self.losses.setdefault(name, []).append(loss)
        return _joined(output, self, losses, scale)


def _joined(
    output: Output, per_term: PerTermLosses | None, losses: Mapping[str, Tensor], scale: float
) -> Output:
    arguments = (per_term, tuple(losses), scale, *losses.values())
    if isinstance(output, tuple):
        return (_Inject.apply(output[0], *arguments), *output[1:])
    return _Inject.apply(output, *arguments)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        per_term: PerTermLosses | None,
        names: tuple[str, ...],
        scale: float,
        *losses: Tensor,
    ) -> Tensor:
        ctx.per_term, ctx.names, ctx.scale = per_term, names, scale
        ctx.like = [loss.new_empty(()) for loss in losses]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # No gradient at all, rather than 0, so that the other terms' graphs are not walked.
        per_term = ctx.per_term
        gradients = [
            torch.full_like(like, ctx.scale) if per_term is None or per_term.on == name else None
            for name, like in zip(ctx.names, ctx.like, strict=True)
        ]
        return grad_output, None, None, None, *gradients
