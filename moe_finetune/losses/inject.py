"""Attach auxiliary losses to the graph at a block's output, without changing the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_finetune.losses.objective import LayerLoss

Output = TypeVar("Output", Tensor, tuple)


def inject(output: Output, loss: Tensor, scale: float) -> Output:
    """Return ``output`` unchanged; backward through it adds ``scale * d(loss)`` to all gradients.

    Equivalent to adding ``scale * loss`` to the model's loss, but the loss does not have to leave
    the layer, so it works under any trainer and with checkpointed or sharded layers.

    Args:
        output: the block's output, which must be part of the differentiated graph. If it is a tuple
            (GPT-OSS also returns routing weights), its first element is used.
        scale: usually 1 / (micro-batches of this optimizer step).
    """
    return _joined(output, None, ("",), (1.0,), (1.0,), scale, loss)


class Joins(Protocol):
    """Interface: attach a layer's losses to its output other than by :func:`inject`."""

    def join(self, output: Output, loss: LayerLoss, scale: float, first_visit: bool) -> Output:
        """Return the block's output; ``first_visit`` is False when a checkpointed layer reruns."""
        ...


class PerTermLosses:
    """Injects each term separately, so that a backward can select which of them act.

    With ``retain_graph`` one forward's graph gives the gradients of each term and of the trainer's
    loss. ``only`` names the terms that act in the next backward, each at weight 1; None: all, at
    their weights.
    """

    def __init__(self) -> None:
        self.only: tuple[str, ...] | None = None

    def join(self, output: Output, loss: LayerLoss, scale: float, first_visit: bool) -> Output:
        names = tuple(loss.losses)
        factors = tuple(loss.factors[name] for name in names)
        at_one = tuple(loss.at_one[name] for name in names)
        return _joined(output, self, names, factors, at_one, scale, *loss.losses.values())


class CollectedLosses:
    """Collects the layers' losses for the caller to differentiate; injects none."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def join(self, output: Output, loss: LayerLoss, scale: float, first_visit: bool) -> Output:
        total = loss.total
        # A layer that is run again recomputes what the loss of its first visit saved.
        if first_visit and total is not None:
            self.losses.append(total)
        return output


def _joined(output: Output, *arguments: Any) -> Output:
    if isinstance(output, tuple):
        return (_Inject.apply(output[0], *arguments), *output[1:])
    return _Inject.apply(output, *arguments)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        chosen: PerTermLosses | None,
        names: tuple[str, ...],
        factors: tuple[float, ...],
        at_one: tuple[float, ...],
        scale: float,
        *losses: Tensor,
    ) -> Tensor:
        ctx.chosen, ctx.names, ctx.scale = chosen, names, scale
        ctx.factors, ctx.at_one = factors, at_one
        ctx.like = [loss.new_empty(()) for loss in losses]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        only = None if ctx.chosen is None else ctx.chosen.only
        factors = ctx.factors
        if only is not None:
            pairs = zip(ctx.names, ctx.at_one, strict=True)
            factors = [factor if name in only else 0.0 for name, factor in pairs]
        gradients = [
            # No gradient at all, rather than 0, so that the graphs of absent terms are not walked.
            torch.full_like(like, ctx.scale).mul_(factor) if factor else None
            for factor, like in zip(factors, ctx.like, strict=True)
        ]
        return grad_output, None, None, None, None, None, *gradients
