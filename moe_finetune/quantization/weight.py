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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import QuantizationError
from moe_finetune.quantization.codec import dequantize, packed_shapes, quantize
from moe_finetune.quantization.packed_layout import Layout, unit_rows
from moe_finetune.quantization.packed_views import ON_PACKED
from moe_finetune.torch_extension import tree_leaves, tree_map


class QuantizedWeight(Tensor):
    """Packed units ``(U, P)`` and scales ``(U, B)`` that behave like the float weight."""

    _packed: Tensor
    _scales: Tensor
    _layout: Layout
    _padded: tuple[Tensor, Tensor] | None = None
    """For a shard and its buffer, bytes and scales padded to the first rank's length."""

    @staticmethod
    def __new__(
        cls, packed_UP: Tensor, scales_UB: Tensor, layout: Layout, dtype: torch.dtype
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
            Layout((unit, columns), stacked=bool(experts)),
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
        packed = self._packed
        scales = self._scales
        layout = self._layout
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
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Layout]]:
        """Return the parts that each rank sends, equally long on all; called by FSDP2."""
        return self._padded or (self._packed, self._scales), (self._layout,)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: tuple[Layout],
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

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Layout, torch.dtype]]:
        """Names of the two inner tensors, for torch."""
        return ["_packed", "_scales"], (self._layout, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Layout, torch.dtype], *_: Any
    ) -> QuantizedWeight:
        return cls(inner["_packed"], inner["_scales"], *context)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run ``func`` on packed weights if it moves or views them, else on dequantized ones."""
        kwargs = kwargs or {}
        packed_version = ON_PACKED.get(func)
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
