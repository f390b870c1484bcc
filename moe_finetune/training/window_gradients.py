"""What the backwards of an optimizer step's window leave in parameters, before any clipping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class WindowGradients:
    """Sums the gradients that reach ``parameters`` on this rank until :meth:`close`.

    ``parameter.grad`` is not such a sum: when an optimizer steps, it is averaged over ranks,
    clipped.

    Args:
        parameters: leaves, whole on this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._handles = [
            parameter.register_hook(partial(self._add, number))
            for number, parameter in enumerate(parameters)
        ]

    def _add(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:  # an expert that got no token
            return
        held = self._sums[number]
        gradient = gradient.detach()
        self._sums[number] = gradient.clone() if held is None else held + gradient

    def sums(self) -> list[Tensor]:
        """The sums so far, in the parameters' order; zeros where nothing came."""
        return [
            torch.zeros_like(parameter) if held is None else held
            for parameter, held in zip(self._parameters, self._sums, strict=True)
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
