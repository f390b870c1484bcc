"""Formats of quantized checkpoints: how their tensors are decoded.

- ``fp8``: 8-bit floats with a scale for each block of a matrix (DeepSeek-V3):
  ``X.weight`` and ``X.weight_scale_inv``.
- ``compressed-tensors``, format ``pack-quantized``: 4-bit integers, eight in an int32, with a scale
  for each group of a row: ``X.weight_packed``, ``X.weight_scale``, ``X.weight_shape``.
- ``mxfp4``: 4-bit floats in blocks of 32 with a power of two as their scale (OCP Microscaling
  formats v1.0; gpt-oss): ``X_blocks`` and ``X_scales``, whose rows are the float stack's columns.

Other formats are refused by name.

Shape legend: R rows and C columns of a matrix.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.io.check_config import QUANTIZATION, UNQUANTIZED, quantization_name
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of a 4-bit float (E2M1)."""
_EXPONENT_BIAS = 127
_MXFP4_BYTES = 16
"""Bytes per block: 32 values, two per byte."""
_INT4_PER_INT32 = 8
_RESTORE = "restore the checkpoint's own files and config.json"

Read = Callable[[TensorInfo], Tensor]


class Format:
    """How a format stores quantized tensors.

    Attributes:
        suffixes: endings of the parts' names, which replace ``of``; the packed values come first.
        dtypes: dtype of each part.
        of: ending of the float tensor's name.
    """

    name: str
    suffixes: tuple[str, ...]
    dtypes: tuple[tuple[str, ...], ...]
    of = ".weight"

    def parts(self, whole: str, stored: Mapping[str, TensorInfo]) -> list[TensorInfo]:
        """The parts of the float tensor ``whole``, checked for presence and dtype."""
        stem = whole.removesuffix(self.of)
        names = [f"{stem}{suffix}" for suffix in self.suffixes]
        present = [stored[name] for name in names if name in stored]
        for name in names:
            if name not in stored:
                raise CheckpointError(
                    f"{present[0].file}: '{name}' is missing, which '{present[0].name}' needs in "
                    f"format {self.name}; {_RESTORE}"
                )
        for info, dtypes in zip(present, self.dtypes, strict=True):
            if info.dtype not in dtypes:
                raise CheckpointError(
                    f"{info.file}: '{info.name}' is stored as {info.dtype}; {self.name} needs "
                    f"{' or '.join(dtypes)}; {_RESTORE}"
                )
        if whole in stored and whole not in names:
            raise CheckpointError(
                f"{present[0].file}: '{whole}' is stored twice, as a float and as "
                f"'{present[0].name}'; {_RESTORE}"
            )
        return present

    def shape(self, parts: list[TensorInfo], read: Read) -> tuple[int, ...]:
        """The float tensor's shape, from the parts' headers and the values of ``weight_shape``."""
        raise NotImplementedError

    def values(self, parts: list[Tensor]) -> Tensor:
        """Decode the parts of a tensor, or of one expert, to float32."""
        raise NotImplementedError


def format_of(config: Mapping[str, Any], path: object) -> Format | None:
    """The format declared in a ``config.json``; None for a checkpoint of floats."""
    section = config.get(QUANTIZATION)
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8":
        return Fp8(section, path)
    if method == "compressed-tensors":
        return Int4(section, path)
    raise UnsupportedModelError(
        f"{path}: {QUANTIZATION}: the checkpoint is quantized with {quantization_name(section)}, "
        f"which cannot be read; {UNQUANTIZED}"
    )


class Fp8(Format):
    """8-bit floats (R, C) with a scale for each block."""

    name, suffixes = "fp8", (".weight", ".weight_scale_inv")
    dtypes = ("F8_E4M3",), FLOATS

    def __init__(self, section: Mapping[str, Any], path: object):
        block = section.get("weight_block_size")
        sizes = block if isinstance(block, list) and len(block) == 2 else [0]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise UnsupportedModelError(
                f"{path}: {QUANTIZATION}: fp8 with weight_block_size {block!r:.60}; only scales of "
                f"blocks, such as [128, 128], can be read; {UNQUANTIZED}"
            )
        self.block: tuple[int, int] = (sizes[0], sizes[1])

    def shape(self, parts: list[TensorInfo], read: Read) -> tuple[int, ...]:
        weight, scale = parts
        _check_dimensions(weight, 2)
        tiles = tuple(
            math.ceil(size / block) for size, block in zip(weight.shape, self.block, strict=True)
        )
        _check_shape(scale, tiles, weight, f"blocks of {list(self.block)} (weight_block_size)")
        return weight.shape

    def values(self, parts: list[Tensor]) -> Tensor:
        return _scaled(parts[0].float(), parts[1].float(), self.block)


class Int4(Format):
    """4-bit integers, eight per int32, a scale for each group of a row, and the shape."""

    name = "compressed-tensors int4"
    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    dtypes = ("I32",), FLOATS, INTEGERS

    def __init__(self, section: Mapping[str, Any], path: object):
        self.group = _group_size(section, path)

    def shape(self, parts: list[TensorInfo], read: Read) -> tuple[int, ...]:
        packed, scale, sizes = parts
        _check_dimensions(packed, 2)
        if sizes.shape != (2,):
            raise CheckpointError(
                f"{sizes.file}: '{sizes.name}' has shape {list(sizes.shape)}; expected [2], the "
                f"rows and columns of the weight; {_RESTORE}"
            )
        rows, columns = read(sizes).tolist()
        declared = f"the {rows} x {columns} that '{sizes.name}' declares"
        if min(rows, columns) < 1 or packed.shape != (rows, -(-columns // _INT4_PER_INT32)):
            raise CheckpointError(
                f"{packed.file}: '{packed.name}' has shape {list(packed.shape)}, which does not "
                f"pack {declared}, {_INT4_PER_INT32} columns in a number; {_RESTORE}"
            )
        width = columns if self.group is None else self.group
        if columns % width:
            raise CheckpointError(
                f"{sizes.file}: groups of {width} (group_size) do not divide {declared}; {_RESTORE}"
            )
        _check_shape(scale, (rows, columns // width), packed, f"groups of {width} (group_size)")
        return rows, columns

    def values(self, parts: list[Tensor]) -> Tensor:
        packed, scale, (rows, columns) = parts[0], parts[1].float(), parts[2].tolist()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        digits = ((packed.unsqueeze(-1) >> shifts) & 15) - 8
        weight = digits.reshape(rows, -1)[:, :columns].float()
        return _scaled(weight, scale, (1, columns // scale.shape[1]))


class Mxfp4(Format):
    """Bytes of two 4-bit floats (..., C, R / 32, 16) and exponents; packed rows are columns."""

    name = "mxfp4"
    suffixes = ("_blocks", "_scales")
    of = ""
    dtypes = ("U8",), ("U8",)

    def shape(self, parts: list[TensorInfo], read: Read) -> tuple[int, ...]:
        packed, scales = parts
        _check_dimensions(packed, 4)
        experts, rows, blocks, half = packed.shape
        if half != _MXFP4_BYTES:
            raise CheckpointError(
                f"{packed.file}: '{packed.name}' has shape {list(packed.shape)}; its last "
                f"dimension must be {_MXFP4_BYTES}, the bytes of a block; {_RESTORE}"
            )
        _check_shape(scales, (experts, rows, blocks), packed, "an exponent a block")
        return experts, blocks * half * 2, rows

    def values(self, parts: list[Tensor]) -> Tensor:
        packed, exponents = parts
        both = torch.stack([packed & 15, packed >> 4], -1).long()
        scales = torch.exp2(exponents.float() - _EXPONENT_BIAS).unsqueeze(-1)
        values = torch.tensor(FP4)[both].flatten(-2) * scales
        return values.flatten(-2).transpose(-1, -2).contiguous()


_REQUIRED = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None}
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "actorder": None}
"""Of the library compressed-tensors."""


def _group_size(section: Mapping[str, Any], path: object) -> int | None:
    """Number of columns that share a scale; None for one scale per row."""

    def refuse(problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{path}: {QUANTIZATION}: compressed-tensors with {problem}; only symmetric 4-bit "
            f"integers in 'pack-quantized' can be read; {UNQUANTIZED}"
        )

    if section.get("format") != "pack-quantized":
        raise refuse(f"format {section.get('format')!r:.60}")
    if section.get("transform_config"):
        raise refuse("a transform_config, which rotates the weights,")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refuse(f"config_groups {groups!r:.60}")
    widths = set()
    for name, group in groups.items():
        where = f"config_groups.{name:.40}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise refuse(f"{where} that describes no weights")
        if group.get("format") not in (None, "pack-quantized"):
            raise refuse(f"{where}.format {group['format']!r:.60}")
        facts = _DEFAULTS | weights
        facts["actorder"] = facts["actorder"] or None
        for key, value in _REQUIRED.items():
            if type(facts[key]) is not type(value) or facts[key] != value:
                raise refuse(f"{where}.weights.{key} {facts[key]!r:.60}")
        strategy, size = weights.get("strategy"), weights.get("group_size")
        by_group = type(size) is int and size > 0 and strategy in (None, "group")
        by_row = size in (None, -1) and (strategy == "channel" or (size, strategy) == (-1, None))
        if not by_group and not by_row:
            raise refuse(f"{where}.weights.strategy {strategy!r:.60} and group_size {size!r:.60}")
        widths.add(size if by_group else None)
    if len(widths) > 1:
        raise refuse("config_groups whose group_size differ")
    return widths.pop()


def _check_dimensions(info: TensorInfo, count: int) -> None:
    if len(info.shape) != count:
        raise CheckpointError(
            f"{info.file}: '{info.name}' has shape {list(info.shape)}; expected {count} "
            f"dimensions; {_RESTORE}"
        )


def _check_shape(
    scale: TensorInfo, shape: tuple[int, ...], packed: TensorInfo, layout: str
) -> None:
    if scale.shape != shape:
        raise CheckpointError(
            f"{scale.file}: '{scale.name}' has shape {list(scale.shape)}; expected {list(shape)}, "
            f"since '{packed.name}' is {list(packed.shape)} with {layout}; {_RESTORE}"
        )


def _scaled(values_RC: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """``values_RC`` times the scale of their block of rows and columns; the last may be partial."""
    zero = bool((scale == 0).any())
    for dim, size in enumerate(block):
        length = values_RC.shape[dim]
        scale = scale.repeat_interleave(min(size, length), dim).narrow(dim, 0, length)
    if zero and bool(((scale == 0) & (values_RC != 0)).any()):
        raise ValueError("has a scale of 0 for values that are not 0")
    return values_RC * scale
