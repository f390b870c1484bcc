"""Bytes that are alive at the borders between decoder layers, forward and backward."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moe_finetune.torch_extension import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, counts every new tensor's storage until the last tensor on it is freed.

    On fake tensors this equals what the same operations on real ones would allocate, except for
    memory inside kernels.

    Attributes:
        now: bytes alive.
        peak: the most bytes alive since :meth:`reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value)
        return result

    def reset(self) -> int:
        """Start a new peak and return the previous one."""
        peak, self.peak = self.peak, self.now
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@dataclass(frozen=True)
class LayerBytes:
    """The bytes that one decoder layer adds.

    Attributes:
        kept: alive from its forward until its backward is done.
        forward, backward: peak of that pass, above the bytes alive when it began.
        released: decrease of the bytes alive over its backward, gradients not counted.
    """

    kept: int
    forward: int
    backward: int
    released: int


class Borders:
    """Bytes alive at the borders between layers, forward and backward."""

    def __init__(self, count: int):
        self.live = LiveBytes()
        self.count = count
        self.base = self.before = self.head = self.after_head = 0
        self._begin: dict[int, int] = {}
        self._forward: dict[int, int] = {}  # most
        self._backward: dict[int, tuple[int, int, int]] = {}  # begin, end, most
        self._top = self._now = self._held = 0

    def forward_begins(self, layer: int) -> None:
        """Before decoder layer ``layer`` runs for the first time."""
        if layer == 0:
            self.before = self.live.now - self.base
        self.live.reset()
        self._begin[layer] = self.live.now  # corrects what the previous layer's end recorded

    def forward_ends(self, layer: int) -> None:
        self._forward[layer] = self.live.reset()
        self._top = self._begin[layer + 1] = self.live.now

    def backward_reaches(self, border: int, gradients: int) -> None:
        """The gradient of layer ``border``'s input is computed, or the loss's for ``count``.

        ``gradients``: bytes of the parameters' gradients so far.
        """
        most, now = self.live.reset(), self.live.now
        if border == self.count:
            self.head = most - self._top
            self.after_head = now - self._top - gradients
        else:
            self._backward[border] = (self._now, now - (gradients - self._held), most)
        self._now, self._held = now, gradients

    def layers(self) -> list[LayerBytes]:
        rows = []
        for index in range(self.count):
            forward, (begin, end, most) = self._begin[index], self._backward[index]
            rows.append(
                LayerBytes(
                    kept=self._begin[index + 1] - forward,
                    forward=self._forward[index] - forward,
                    backward=most - begin,
                    released=begin - end,
                )
            )
        return rows

    def end(self, gradients: int) -> None:
        """Called after the backward, which stops at the lowest layer that trains."""
        lowest = min(self._backward, default=self.count)
        if lowest > 0:
            self.backward_reaches(lowest - 1, gradients)
        for layer in range(lowest - 1):
            self._backward[layer] = (self._now, self._now, self._now)


def watch(layers: Any, borders: Borders, gradients: Callable[[], int]) -> None:
    """Install hooks that mark where each layer begins and ends."""

    def reaches(tensor: Tensor, border: int) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: borders.backward_reaches(border, gradients()))

    begun: set[int] = set()
    ended: set[int] = set()  # checkpointing runs a layer again

    def before(layer: nn.Module, args: tuple, index: int) -> None:
        if index not in begun:
            begun.add(index)
            if index == 0:
                reaches(args[0], 0)
            borders.forward_begins(index)

    def after(layer: nn.Module, args: tuple, output: Any, index: int) -> None:
        if index not in ended:
            ended.add(index)
            borders.forward_ends(index)
            reaches(output[0] if isinstance(output, tuple) else output, index + 1)

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda m, a, i=index: before(m, a, i))
        layer.register_forward_hook(lambda m, a, o, i=index: after(m, a, o, i))
