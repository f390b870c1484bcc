"""The step between an expert's two projections, and dropout, with their gradients.

Usually ``z = act(gate) * up`` of stacked projections, gate first. If a class has its own function
(clamped, interleaved, or without a gate), that function is called.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OwnGate:
    """A class's own function from the first projection's rows to z, differentiated by autograd."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, rows_SU: Tensor) -> Tensor:
        return self.function(rows_SU)


def gated(rows_S2D: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """``z_SD`` from stacked gate and up projections, gate first, or by an :class:`OwnGate`."""
    if isinstance(activation, OwnGate):
        return activation(rows_S2D)
    gate, up = rows_S2D.chunk(2, dim=-1)
    return activation(gate).mul_(up) if is_silu(activation) else activation(gate) * up


def gated_gradient(
    rows_S2D: Tensor, dz_SD: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Gradient of ``gated`` with respect to its rows."""
    if isinstance(activation, OwnGate):
        # Elementwise, so its graph lives for this part of the rows only.
        with torch.enable_grad():
            leaf = rows_S2D.detach().requires_grad_()
            value = activation(leaf)
        return torch.autograd.grad(value, leaf, dz_SD)[0]
    gate, up = rows_S2D.chunk(2, dim=-1)
    # Both halves are written where they are read next; concatenating would copy S x 2D numbers.
    out_S2D = torch.empty_like(rows_S2D)
    dgate, dup = out_S2D.chunk(2, dim=-1)
    if is_silu(activation):
        torch.mul(dz_SD, torch.nn.functional.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dz_SD * up, gate, grad_input=dgate)
        return out_S2D
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        value = activation(leaf)
    torch.mul(dz_SD, value.detach(), out=dup)
    dgate.copy_(torch.autograd.grad(value, leaf, dz_SD * up)[0])
    return out_S2D


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the gate's function is SiLU, whose derivative is implemented here."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def keep_mask(shape: tuple[int, int], dropout: float, like: Tensor) -> Tensor | None:
    """Mask of the values that dropout keeps, or None without dropout."""
    if dropout == 0.0:
        return None
    return torch.empty(shape, dtype=torch.bool, device=like.device).bernoulli_(1.0 - dropout)


def dropped(values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """``values`` after dropout with ``mask``; on a gradient, this is dropout's backward."""
    return values if mask is None else values * mask * (1.0 / (1.0 - dropout))
