"""Join an auxiliary loss to the graph at a block's output, without changing the output."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output", Tensor, tuple)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_empty(())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_output, torch.full_like(ctx.like, ctx.scale), None


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
    if isinstance(output, tuple):
        return (_Inject.apply(output[0], loss, scale), *output[1:])
    return _Inject.apply(output, loss, scale)
