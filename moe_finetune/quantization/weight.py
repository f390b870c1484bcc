"""A frozen weight held quantized: an expert stack ``(E, O, I)`` or a matrix ``(O, I)``.

It is a tensor of the float weight's shape, dtype and device, so that PEFT, transformers and the
experts' forward see what they expect, and it holds packed bytes and scales alone. Reading some
experts dequantizes those; any other operation dequantizes what it reads and gives an ordinary
tensor. Autograd saves the packed weight for the backward, which dequantizes it again. Writing into
it is an error: an update would be lost.

bitsandbytes' own layers are not used, for what they hide: ``Linear4bit``'s weight has neither the
shape that PEFT reads for a LoRA on a parameter nor the dtype that some models cast to, and
``Linear8bitLt`` rounds activations. Blocks, scales and values are those of its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moe_finetune.errors import QuantizationError
from moe_finetune.quantization.codec import Kind, dequantize, packed_shapes, quantize


@dataclass(frozen=True)
class _Layout:
    """How the packed matrices are read.

    Attributes:
        kind: number format.
        stored: rows and columns of each packed matrix.
        stacked: whether the weight has a dimension of experts.
        transposed: whether the weight is the packed matrices' transposed.
        rows: those of a (transposed) matrix that the weight has.
    """

    kind: Kind
    stored: tuple[int, int]
    stacked: bool
    transposed: bool = False
    rows: tuple[int, int, int] | None = None

    def shape(self, experts: int) -> tuple[int, ...]:
        first, second = self.stored[::-1] if self.transposed else self.stored
        if self.rows is not None:
            first = len(range(*self.rows))
        return (experts, first, second) if self.stacked else (first, second)


class QuantizedWeight(Tensor):
    """Packed matrices ``(E, P)`` and scales ``(E, B)`` that behave as the weight they stand for."""

    _packed: Tensor
    _scales: Tensor
    _layout: _Layout

    @staticmethod
    def __new__(
        cls, packed_EP: Tensor, scales_EB: Tensor, layout: _Layout, dtype: torch.dtype
    ) -> QuantizedWeight:
        self: Any = Tensor._make_wrapper_subclass(
            cls, layout.shape(packed_EP.shape[0]), dtype=dtype, device=packed_EP.device
        )
        self._packed, self._scales, self._layout = packed_EP, scales_EB, layout
        return self

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        kind: Kind,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> QuantizedWeight:
        """A weight of ``shape`` (E, R, C) or (R, C), to be filled with :meth:`store`."""
        *experts, rows, columns = shape
        count = experts[0] if experts else 1
        size, scales = packed_shapes(kind, rows, columns)
        item = torch.int8 if kind == "int8" else torch.uint8
        return cls(
            torch.empty(count, size, dtype=item, device=device),
            torch.empty(count, scales, dtype=torch.float32, device=device),
            _Layout(kind, (rows, columns), stacked=bool(experts)),
            dtype,
        )

    @classmethod
    def of(cls, weight: Tensor, kind: Kind) -> QuantizedWeight:
        """``weight`` (E, R, C) or (R, C), quantized matrix by matrix."""
        made = cls.empty(weight.shape, kind, weight.dtype, weight.device)
        matrices = weight.detach() if weight.dim() == 3 else weight.detach().unsqueeze(0)
        for expert, matrix in enumerate(matrices):
            made.store(expert, matrix)
        return made

    def store(self, expert: int, matrix_RC: Tensor) -> None:
        """Quantize ``matrix_RC`` into the place of ``expert``; 0 where there is but one."""
        packed, scales = quantize(matrix_RC.to(self._packed.device), self._layout.kind)
        self._packed[expert] = packed
        self._scales[expert] = scales

    @property
    def kind(self) -> Kind:
        return self._layout.kind

    @property
    def stored_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self._packed, self._scales))

    def dequantize(self, experts: slice | Sequence[int] | Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The weight as an ordinary tensor; of a stack only ``experts``, in their order."""
        packed, scales, layout = self._packed, self._scales, self._layout
        if experts is not None:
            packed, scales = packed[experts], scales[experts]
        made = dequantize(
            packed.contiguous(), scales.contiguous(), *layout.stored, layout.kind, self.dtype
        )
        if layout.transposed:
            made = made.transpose(1, 2)
        if layout.rows is not None:
            made = made[:, slice(*layout.rows)]
        return made if layout.stacked else made[0]

    # -- as a tensor ---------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"QuantizedWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[_Layout, torch.dtype]]:
        """The two tensors that it is made of, for torch."""
        return ["_packed", "_scales"], (self._layout, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], held: tuple[_Layout, torch.dtype], *_: Any
    ) -> QuantizedWeight:
        return cls(inner["_packed"], inner["_scales"], *held)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run ``func``: kept quantized where it moves or views, else on dequantized weights."""
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None:
            found = own(*args, **kwargs)
            if found is not NotImplemented:
                return found
        _refuse(func, args, kwargs)

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, QuantizedWeight) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    def _like(self, packed: Tensor, scales: Tensor, **changes: Any) -> QuantizedWeight:
        dtype = changes.pop("dtype", self.dtype)
        return QuantizedWeight(packed, scales, replace(self._layout, **changes), dtype)

    def _view(self, **changes: Any) -> QuantizedWeight:
        return self._like(self._packed, self._scales, **changes)


def quantized(tensor: Any) -> bool:
    """Whether a tensor or parameter is held quantized."""
    return isinstance(tensor, QuantizedWeight)


def quantization_of(model: nn.Module) -> Kind | None:
    """The format that a model's quantized weights have, or None where none is."""
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            return parameter.kind
    return None


def _refuse(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise for an operation that would write into a quantized weight, or shard it."""
    name = str(func)
    schema = func._schema
    for argument, value in [
        *zip(schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ]:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and any(map(quantized, tree_leaves(value))):
            raise QuantizationError(
                f"{name}: a quantized weight cannot be written to; train an adapter, and merge it "
                "into the unquantized base (moe-finetune merge)"
            )
    if name.startswith(("c10d.", "_c10d", "aten.split", "aten.chunk")):
        raise QuantizationError(
            f"{name}: quantized weights cannot be sharded over ranks (FSDP, DeepSpeed, tensor "
            "parallelism); use one process, or DDP, or train without quantization"
        )


def _alias(self: QuantizedWeight, *_: Any, **__: Any) -> QuantizedWeight:
    return self._view()


def _clone(self: QuantizedWeight, **_: Any) -> QuantizedWeight:
    return self._like(self._packed.clone(), self._scales.clone())


def _to_copy(
    self: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> QuantizedWeight:
    parts = (part.to(device, non_blocking=non_blocking) for part in (self._packed, self._scales))
    return self._like(*parts, dtype=dtype or self.dtype)


def _swap(self: QuantizedWeight, first: int = 0, second: int = 1) -> Any:
    dims = {first % self.dim(), second % self.dim()}
    if dims != {self.dim() - 2, self.dim() - 1} or self._layout.rows is not None:
        return NotImplemented
    return self._view(transposed=not self._layout.transposed)


def _select(self: QuantizedWeight, dim: int, index: int) -> Any:
    if not self._layout.stacked or dim % 3 != 0:
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
    dim %= self.dim()
    chosen = slice(start, end, step).indices(self.shape[dim])
    if chosen == (0, self.shape[dim], 1):
        return self._view()
    if self._layout.stacked and dim == 0:
        return self.dequantize(slice(*chosen))
    if dim == self.dim() - 2 and self._layout.rows is None:
        return self._view(rows=chosen)
    return NotImplemented


def _index(self: QuantizedWeight, indices: list[Tensor | None]) -> Any:
    first = indices[0]
    if not self._layout.stacked or len(indices) != 1 or first is None or first.dim() != 1:
        return NotImplemented
    return self.dequantize(first.to(self._packed.device))


_aten = torch.ops.aten
_OWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.t.default: _swap,
    _aten.transpose.int: _swap,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
}
"""Operations that read a part, move, or view."""
