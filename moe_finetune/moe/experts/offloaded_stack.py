"""An expert stack whose values are elsewhere: shape, dtype and how to fetch the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.quantization.weight import QuantizedWeight
from moe_finetune.torch_extension import tree_map

aten: Any = torch.ops.aten
_VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
}
View = tuple[Any, tuple, dict]
"""An operation, its arguments after the tensor, and its keyword arguments."""


class OffloadedStack(Tensor):
    """A stack without its values. Views do not fetch them; other operations do.

    Args:
        fetch: returns the whole stack on ``device``.
        host: a tensor with the stack's shape and dtype.
        views: operations to apply to the fetched stack.
    """

    _fetch: Callable[[], Tensor]
    _host: Tensor
    _views: tuple[View, ...]

    @staticmethod
    def __new__(
        cls,
        fetch: Callable[[], Tensor],
        host: Tensor,
        device: torch.device,
        views: tuple[View, ...] = (),
    ) -> OffloadedStack:
        shape = _viewed(torch.empty(host.shape, dtype=host.dtype, device="meta"), views)
        self: Any = Tensor._make_wrapper_subclass(
            cls,
            shape.shape,
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        self._fetch, self._host, self._views = fetch, host, views
        return self

    def values(self) -> Tensor:  # type: ignore[override]
        """The tensor on the device; still quantized for a quantized stack."""
        return _viewed(self._fetch(), self._views)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedStack(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            stack = args[0]
            views = (*stack._views, (func, args[1:], kwargs))
            return OffloadedStack(stack._fetch, stack._host, stack.device, views)
        if func._schema.is_mutable and isinstance(args[0], OffloadedStack):
            raise CaptureError(
                f"{func}: an offloaded expert stack is frozen, and changes to it would be lost. "
                "PEFT's forward and merge write to it; run the model under Specialization or "
                "Recorder, and merge with `moe-finetune merge`; or set model.offload: none"
            )
        args, kwargs = tree_map(fetched, (args, kwargs))
        return func(*args, **kwargs)


def _viewed(tensor: Tensor, views: tuple[View, ...]) -> Tensor:
    for func, args, kwargs in views:
        tensor = func(tensor, *args, **kwargs)
    return tensor


def fetched(value: Any) -> Any:
    """An offloaded stack's tensor on the device; anything else unchanged."""
    return value.values() if isinstance(value, OffloadedStack) else value


def dequantized_when_read(weight: Tensor) -> bool:
    """Whether a weight, which may be offloaded, is stored quantized."""
    stored = weight._host if isinstance(weight, OffloadedStack) else weight
    return isinstance(stored, QuantizedWeight)
