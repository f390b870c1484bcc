"""Operations of torch that move, view or slice a quantized weight and keep it packed.

Each takes a ``QuantizedWeight``, which imports this table, and returns another, or
``NotImplemented``: the operation then reads X"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import QuantizationError
from moe_finetune.quantization.codec import BLOCK


def _alias(self: Any, *_: Any, **__: Any) -> Any:
    view = self._view()
    view._padded = self._padded
    return view


def _clone(self: Any, **_: Any) -> Any:
    return self.on_parts(torch.clone)


def _to_copy(
    self: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    # FSDP2 gathers the padded tensors that it has moved from the host; a shard is their first part.
    parts = self._padded or (self._packed, self._scales)
    packed, scales = (part.to(device, non_blocking=non_blocking) for part in parts)
    units = len(self._packed)
    own = (packed, scales) if self._is_buffer else (packed[:units], scales[:units])
    copy = self._like(*own, dtype=dtype or self.dtype)
    if self._padded is not None:
        copy._padded = packed, scales
    return copy


def _swap(self: Any, first: int = 0, second: int = 1) -> Any:
    dims = {first % self.dim(), second % self.dim()}
    layout = self._layout
    if layout.flat or layout.rows is not None or dims != {self.dim() - 2, self.dim() - 1}:
        return NotImplemented
    return self._view(transposed=not self._layout.transposed)


def _select(self: Any, dim: int, index: int) -> Any:
    if not self._layout.experts_first or dim % 3 != 0:
        return NotImplemented
    expert = index % self.shape[0]
    return self.dequantize(slice(expert, expert + 1))[0]


def _slice(
    self: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if self._layout.flat:
        return NotImplemented
    dim %= self.dim()
    layout, length = self._layout, self.shape[dim]
    first, last, step = slice(start, end, step).indices(length)
    last = max(first, last)
    if dim == 0 and step == 1 and (layout.stacked or layout.whole):
        unit = layout.rows_per_unit
        if first % unit == 0 and last % unit == 0:
            part = self._units(first // unit, last // unit)
            if first == 0 and (last == length or self._is_buffer):
                part._padded = self._padded
            return part
    if layout.stacked and dim == 0:
        return self.dequantize(slice(first, last, step))
    if dim == self.dim() - 2 and layout.rows is None:
        return self._view(rows=(first, last, step))
    return self._view() if (first, last, step) == (0, length, 1) else NotImplemented


def _index(self: Any, indices: list[Tensor | None]) -> Any:
    first = indices[0]
    if not self._layout.experts_first or len(indices) != 1 or first is None or first.dim() != 1:
        return NotImplemented
    return self.dequantize(first.to(self._packed.device))


# What ``fully_shard`` does to a parameter, on units: split, a padded buffer, a copy into its first
# rows, and after the all-gather a view of the original size.


def _split(self: Any, size: int, dim: int = 0) -> Any:
    layout = self._layout
    if dim % self.dim() != 0 or not layout.whole:
        return NotImplemented
    unit = layout.rows_per_unit
    if size % unit:
        raise QuantizationError(
            f"a quantized weight of shape {tuple(self.shape)} cannot be divided into parts of "
            f"{size} rows: {unit} rows share blocks of {BLOCK} values; use another number of "
            "processes"
        )
    step = size // unit
    return [self._units(first, first + step) for first in range(0, len(self._packed), step)]


def _new_zeros(self: Any, size: Sequence[int], **_: Any) -> Any:
    layout = self._layout
    unit = layout.rows_per_unit
    if tuple(size[1:]) != self.shape[1:] or size[0] % unit or not layout.whole:
        return NotImplemented
    buffer = self.on_parts(lambda part: part.new_zeros(size[0] // unit, part.shape[1]))
    buffer._padded = buffer._packed, buffer._scales
    return buffer


def _copy(self: Any, source: Any, *_: Any) -> Any:
    if type(source) is not type(self) or source._layout != self._layout:
        return NotImplemented
    self._packed.copy_(source._packed)
    self._scales.copy_(source._scales)
    return self


def _reshape(self: Any, size: Sequence[int]) -> Any:
    if tuple(size) == (-1,) and self._layout.whole:
        return self._view(flat=True)
    return self._view() if tuple(size) == tuple(self.shape) else NotImplemented


def _as_strided(
    self: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    contiguous = tuple(stride) == self.stride() and not offset
    if not contiguous or tuple(size[1:]) != self.shape[1:]:
        # Strides are those of a contiguous weight; a dequantized one has gaps after its blocks.
        return self.dequantize().contiguous().as_strided(size, stride, offset)
    unit = self._layout.rows_per_unit
    return self._units(0, size[0] // unit)


_aten = torch.ops.aten
ON_PACKED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.t.default: _swap,
    _aten.transpose.int: _swap,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten.split.Tensor: _split,
    _aten.new_zeros.default: _new_zeros,
    _aten.copy_.default: _copy,
    _aten.view.default: _reshape,
    _aten.as_strided.default: _as_strided,
}
"""Operations that slice, move or view; others get dequantized values."""
