"""Bytes of all tensors that are alive, operation by operation, and their peak."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is on, every new tensor's storage counts until the last tensor on it is gone.

    On fake tensors it tells what the same operations on real ones would hold, but for what a kernel
    uses inside.

    Attributes:
        now: bytes alive.
        peak: the most that were alive since :meth:`reset`.
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
        """Begin a new peak; return the one before."""
        before, self.peak = self.peak, self.now
        return before

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
