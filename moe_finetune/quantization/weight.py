"""A frozen weight stored quantized: an expert stack ``(E, O, I)`` or a matrix ``(O, I)``.

It is a tensor with the float weight's shape, dtype and device, as PEFT, transformers and the
experts' forward expect, but it stores only packed bytes and scales. Views and slices of experts
stay packed; any other operation dequantizes what it reads and returns an ordinary tensor. Autograd
saves the packed weight, and the backward dequantizes it again. Writing into it is an error, because
the update would be lost.

Packed bytes and scales are stored by unit: an expert of a stack, or the fewest rows of a matrix
that fill whole blocks. A unit is never divided, so ranks can share a weight by units: FSDP2 splits
it like an ordinary parameter, all-gathers bytes and scales, and frees them again.

bitsandbytes' own layer is not used: ``Linear4bit``'s weight has neither the shape that PEFT reads
for LoRA on a parameter nor the dtype that some models cast to. Blocks, scales and values are those
of bitsandbytes' functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import QuantizationError
from moe_finetune.quantization.codec import BLOCK, dequantize, packed_shapes, quantize
from moe_finetune.torch_extension import tree_leaves, tree_map


@dataclass(frozen=True)
class _Layout:
    """How the weight maps to the packed matrices.

    Attributes:
        stored: rows and columns of each packed unit.
        stacked: whether units are experts instead of consecutive rows of one matrix.
        transposed: whether the weight is the transpose of the packed matrices.
        rows: start, stop and step of the weight's rows within the (transposed) matrices.
        flat: whether the weight is flattened to one dimension.
    """

    stored: tuple[int, int]
    stacked: bool
    transposed: bool = False
    rows: tuple[int, int, int] | None = None
    flat: bool = False

    def shape(self, units: int) -> tuple[int, ...]:
        rows, columns = self.stored
        if not self.stacked:
            rows *= units
        first, second = (columns, rows) if self.transposed else (rows, columns)
        if self.rows is not None:
            first = len(range(*self.rows))
        if self.flat:
            return (units * math.prod(self.stored),)
        return (units, first, second) if self.stacked else (first, second)

    @property
    def whole(self) -> bool:
        """Whether the weight is all of its units, untransposed and unsliced."""
        return not (self.transposed or self.rows or self.flat)

    @property
    def experts_first(self) -> bool:
        return self.stacked and not self.flat

    @property
    def rows_per_unit(self) -> int:
        """Number of indices of the weight's first dimension per unit."""
        return 1 if self.stacked else self.stored[0]


class QuantizedWeight(Tensor):
    """Packed units ``(U, P)`` and scales ``(U, B)`` that behave like the float weight."""

    _packed: Tensor
    _scales: Tensor
    _layout: _Layout
    _padded: tuple[Tensor, Tensor] | None = None
    """For a shard and its buffer, bytes and scales padded to the first rank's length."""

    @staticmethod
    def __new__(
        cls, packed_UP: Tensor, scales_UB: Tensor, layout: _Layout, dtype: torch.dtype
    ) -> QuantizedWeight:
        self: Any = Tensor._make_wrapper_subclass(
            cls, layout.shape(packed_UP.shape[0]), dtype=dtype, device=packed_UP.device
        )
        self._packed, self._scales, self._layout = packed_UP, scales_UB, layout
        return self

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> QuantizedWeight:
        """A weight of ``shape`` (E, R, C) or (R, C) whose bytes are not set."""
        *experts, rows, columns = shape
        unit = rows if experts else unit_rows(rows, columns)
        units = experts[0] if experts else rows // unit
        size, scales = packed_shapes(unit, columns)
        return cls(
            torch.empty(units, size, dtype=torch.uint8, device=device),
            torch.empty(units, scales, dtype=torch.float32, device=device),
            _Layout((unit, columns), stacked=bool(experts)),
            dtype,
        )

    @classmethod
    def of(cls, weight: Tensor) -> QuantizedWeight:
        """Quantize ``weight`` (E, R, C) or (R, C) matrix by matrix."""
        packed = cls.empty(weight.shape, weight.dtype, weight.device)
        matrices = weight.detach() if weight.dim() == 3 else weight.detach().unsqueeze(0)
        for expert, matrix in enumerate(matrices):
            units = slice(expert, expert + 1) if weight.dim() == 3 else slice(None)
            digits, scales = quantize(matrix)
            packed._packed[units] = digits.view_as(packed._packed[units])
            packed._scales[units] = scales.view_as(packed._scales[units])
        return packed

    def is_finite(self) -> bool:
        """Whether all values are finite: scales are the blocks' largest magnitudes."""
        return bool(torch.isfinite(self._scales).all())

    @property
    def stored_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self._packed, self._scales))

    def dequantize(self, experts: slice | Sequence[int] | Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the weight as an ordinary tensor; of a stack only ``experts``, in their order."""
        packed, scales, layout = self._packed, self._scales, self._layout
        if experts is not None:
            packed, scales = packed[experts], scales[experts]
        values = dequantize(packed.contiguous(), scales.contiguous(), *layout.stored, self.dtype)
        if layout.flat:
            return values.reshape(-1)
        if not layout.stacked:
            values = values.reshape(1, -1, layout.stored[1])
        if layout.transposed:
            values = values.transpose(1, 2)
        if layout.rows is not None:
            values = values[:, slice(*layout.rows)]
        return values if layout.stacked else values[0]

    def on_parts(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The same weight with ``change`` applied to its bytes and to its scales."""
        return self._like(change(self._packed), change(self._scales))

    # -- FSDP2 ---------------------------------------------------------------------------------

    @property
    def _is_buffer(self) -> bool:
        """Whether this is the padded buffer itself, whose beginning is a shard."""
        return self._padded is not None and self._padded[0] is self._packed

    # The other signature that FSDP2 knows demands parts of the float shard's shape.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[_Layout]]:
        """Return the parts that each rank sends, equally long on all; called by FSDP2."""
        return self._padded or (self._packed, self._scales), (self._layout,)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: tuple[_Layout],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedWeight, tuple[Tensor, ...]] | None:
        """Return the weight from all ranks' parts, in memory that FSDP2 owns and frees.

        The last ranks' padding is still at its end; FSDP2 then takes a strided view of the original
        size.
        """
        if out is not None:
            return None  # its parts are views of the memory that was filled again
        packed, scales = gathered
        return QuantizedWeight(packed, scales, metadata[0], param_dtype), ()

    # -- as a tensor ---------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"QuantizedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[_Layout, torch.dtype]]:
        """Names of the two inner tensors, for torch."""
        return ["_packed", "_scales"], (self._layout, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[_Layout, torch.dtype], *_: Any
    ) -> QuantizedWeight:
        return cls(inner["_packed"], inner["_scales"], *context)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run ``func`` on packed weights if it moves or views them, else on dequantized ones."""
        kwargs = kwargs or {}
        packed_version = _ON_PACKED.get(func)
        weight = args[0] if args and isinstance(args[0], QuantizedWeight) else None
        if packed_version is not None and weight is not None:
            result = packed_version(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse(func, args, kwargs)

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, QuantizedWeight) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    def _like(self, packed: Tensor, scales: Tensor, **changes: Any) -> QuantizedWeight:
        dtype = changes.pop("dtype", self.dtype)
        return QuantizedWeight(packed, scales, replace(self._layout, **changes), dtype)

    def _view(self, **changes: Any) -> QuantizedWeight:
        return self._like(self._packed, self._scales, **changes)

    def _units(self, first: int, last: int) -> QuantizedWeight:
        """A view of some units."""
        return self._like(self._packed[first:last], self._scales[first:last])


def unit_rows(rows: int, columns: int) -> int:
    """The fewest rows that fill whole blocks and divide the matrix; all rows if none do."""
    unit = BLOCK // math.gcd(BLOCK, columns)
    return unit if rows % unit == 0 else rows


def local_weight(tensor: Any) -> QuantizedWeight | None:
    """The quantized weight in a parameter, or this rank's part of it; None for others."""
    if hasattr(tensor, "device_mesh"):
        tensor = tensor.to_local()
    return tensor if isinstance(tensor, QuantizedWeight) else None


def quantized(tensor: Any) -> bool:
    """Whether a tensor or parameter, or this rank's part of it, is stored quantized."""
    return local_weight(tensor) is not None


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers in memory."""
    total = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        weight = local_weight(tensor)
        total += tensor.numel() * tensor.element_size() if weight is None else weight.stored_bytes
    return total


def _refuse(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise if an operation would write into a quantized weight or communicate its float values."""
    name = str(func)
    schema = func._schema
    for argument, value in [
        *zip(schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ]:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and any(map(quantized, tree_leaves(value))):
            raise QuantizationError(
                f"{name}: a quantized weight cannot be changed; train an adapter, and merge it "
                "into the unquantized base (moe-finetune merge)"
            )
    if name.startswith(("c10d.", "_c10d")):
        raise QuantizationError(
            f"{name}: quantized weights cannot be sent between ranks by this wrapper (FSDP1, "
            "DeepSpeed, tensor parallelism); use FSDP2, parallel.experts or DDP"
        )


def _alias(self: QuantizedWeight, *_: Any, **__: Any) -> QuantizedWeight:
    view = self._view()
    view._padded = self._padded
    return view


def _clone(self: QuantizedWeight, **_: Any) -> QuantizedWeight:
    return self.on_parts(torch.clone)


def _to_copy(
    self: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> QuantizedWeight:
    # FSDP2 gathers the padded tensors that it has moved from the host; a shard is their first part.
    parts = self._padded or (self._packed, self._scales)
    packed, scales = (part.to(device, non_blocking=non_blocking) for part in parts)
    units = len(self._packed)
    own = (packed, scales) if self._is_buffer else (packed[:units], scales[:units])
    copy = self._like(*own, dtype=dtype or self.dtype)
    if self._padded is not None:
        copy._padded = packed, scales
    return copy


def _swap(self: QuantizedWeight, first: int = 0, second: int = 1) -> Any:
    dims = {first % self.dim(), second % self.dim()}
    layout = self._layout
    if layout.flat or layout.rows is not None or dims != {self.dim() - 2, self.dim() - 1}:
        return NotImplemented
    return self._view(transposed=not self._layout.transposed)


def _select(self: QuantizedWeight, dim: int, index: int) -> Any:
    if not self._layout.experts_first or dim % 3 != 0:
        return NotImplemented
    expert = index % self.shape[0]
    return self.dequantize(slice(expert, expert + 1))[0]


def _slice(
    self: QuantizedWeight,
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


def _index(self: QuantizedWeight, indices: list[Tensor | None]) -> Any:
    first = indices[0]
    if not self._layout.experts_first or len(indices) != 1 or first is None or first.dim() != 1:
        return NotImplemented
    return self.dequantize(first.to(self._packed.device))


# What ``fully_shard`` does to a parameter, on units: split, a padded buffer, a copy into its first
# rows, and after the all-gather a view of the original size.


def _split(self: QuantizedWeight, size: int, dim: int = 0) -> Any:
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


def _new_zeros(self: QuantizedWeight, size: Sequence[int], **_: Any) -> Any:
    layout = self._layout
    unit = layout.rows_per_unit
    if tuple(size[1:]) != self.shape[1:] or size[0] % unit or not layout.whole:
        return NotImplemented
    buffer = self.on_parts(lambda part: part.new_zeros(size[0] // unit, part.shape[1]))
    buffer._padded = buffer._packed, buffer._scales
    return buffer


def _copy(self: QuantizedWeight, source: Tensor, *_: Any) -> Any:
    if not isinstance(source, QuantizedWeight) or source._layout != self._layout:
        return NotImplemented
    self._packed.copy_(source._packed)
    self._scales.copy_(source._scales)
    return self


def _reshape(self: QuantizedWeight, size: Sequence[int]) -> Any:
    if tuple(size) == (-1,) and self._layout.whole:
        return self._view(flat=True)
    return self._view() if tuple(size) == tuple(self.shape) else NotImplemented


def _as_strided(
    self: QuantizedWeight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    contiguous = tuple(stride) == self.stride() and not offset
    if not contiguous or tuple(size[1:]) != self.shape[1:]:
        return NotImplemented
    unit = self._layout.rows_per_unit
    return self._units(0, size[0] // unit)


_aten = torch.ops.aten
_ON_PACKED: dict[Any, Callable[..., Any]] = {
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
