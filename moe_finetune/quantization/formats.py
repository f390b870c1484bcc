"""Formats of checkpoints that come quantised, and the floats that their tensors stand for:

- ``fp8``: 8-bit floats with a scale for each block of a matrix (DeepSeek-V3):
  ``X.weight`` and ``X.weight_scale_inv``.
- ``compressed-tensors``, format ``pack-quantized``: 4-bit integers, eight in an int32, with a scale
  for each group of a row: ``X.weight_packed``, ``X.weight_scale``, ``X.weight_shape``.
- ``mxfp4``: 4-bit floats in blocks of 32 with a power of two as their scale (OCP Microscaling
  formats v1.0; gpt-oss): ``X_blocks`` and ``X_scales``, whose rows are the float stack's columns.

Other formats are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.io.config_file import QUANTIZATION
from moe_finetune.io.safetensors_header import TensorInfo

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


_REMEDY = (
    "use an unquantised checkpoint of the model, or one stored as fp8, compressed-tensors "
    "(4-bit pack-quantized) or mxfp4"
)


Read = Callable[[TensorInfo], Tensor]


@dataclass(frozen=True)
class Format:
    """How quantised tensors lie in the files.

    Attributes:
        suffixes: a float tensor's name without ``of`` and each of these are its parts, the packed
            values first.
        of: the end of the float tensor's name.
        shape: of the float tensor, from the parts' and what they hold.
        values: the float32 tensor from the parts; of one expert from one expert's parts.
    """

    name: str
    suffixes: tuple[str, ...]
    of: str
    shape: Callable[[list[TensorInfo], Read], tuple[int, ...]]
    values: Callable[[list[Tensor]], Tensor]


def format_of(config: Mapping[str, Any], place: object) -> Format | None:
    """The format of a ``config.json``; None for a checkpoint of floats.

    Raises:
        UnsupportedModelError: a format that cannot be read, by its name.
    """
    given = config.get(QUANTIZATION)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "mxfp4":
        return Format("mxfp4", ("_blocks", "_scales"), "", _mxfp4_shape, _mxfp4)
    if method == "fp8":
        return _fp8_format(given, place)
    if method == "compressed-tensors":
        return _packed_format(given, place)
    raise UnsupportedModelError(
        f"{place}: {QUANTIZATION}: the checkpoint is quantised with "
        f"{f'{method!r:.60}' if method else 'an unnamed method'}, which cannot be read; {_REMEDY}"
    )


def _fp8_format(given: Mapping[str, Any], place: object) -> Format:
    block = given.get("weight_block_size")
    sizes = isinstance(block, list) and len(block) == 2
    if not sizes or not all(type(size) is int and size > 0 for size in block):  # type: ignore[union-attr]
        raise UnsupportedModelError(
            f"{place}: {QUANTIZATION}: fp8 with weight_block_size {block!r:.60}; only scales of "
            f"blocks, such as [128, 128], can be read; {_REMEDY}"
        )
    rows, columns = block  # type: ignore[misc]

    def values(parts: list[Tensor]) -> Tensor:
        weight, scale = parts[0].float(), parts[1].float()
        wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]]
        return weight * wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]

    return Format(
        "fp8", (".weight", ".weight_scale_inv"), ".weight", lambda p, _: tuple(p[0].shape), values
    )


def _packed_format(given: Mapping[str, Any], place: object) -> Format:
    groups = given.get("config_groups") or {}
    weights = [(group or {}).get("weights") or {} for group in groups.values()]
    wanted = {"num_bits": 4, "type": "int", "symmetric": True}
    plain = all(w.get(key, value) == value for w in weights for key, value in wanted.items())
    ordered = any(w.get("actorder") for w in weights)
    if given.get("format") != "pack-quantized" or not weights or not plain or ordered:
        form = f"compressed-tensors in format {given.get('format')!r:.60}"
        raise UnsupportedModelError(
            f"{place}: {QUANTIZATION}: {form}; only symmetric 4-bit integers in 'pack-quantized' "
            f"can be read; {_REMEDY}"
        )

    def shape(parts: list[TensorInfo], read: Read) -> tuple[int, ...]:
        return tuple(int(size) for size in read(parts[2]).tolist())

    def values(parts: list[Tensor]) -> Tensor:
        packed, scale, (rows, columns) = parts[0], parts[1].float(), parts[2].tolist()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        digits = ((packed.unsqueeze(-1) >> shifts) & 15) - 8
        weight = digits.reshape(rows, -1)[:, :columns].float()
        return weight * scale.repeat_interleave(math.ceil(columns / scale.shape[1]), 1)[:, :columns]

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    return Format("compressed-tensors int4", suffixes, ".weight", shape, values)


def _mxfp4_shape(parts: list[TensorInfo], _: Read) -> tuple[int, ...]:
    experts, rows, blocks, half = parts[0].shape
    return experts, blocks * half * 2, rows


def _mxfp4(parts: list[Tensor]) -> Tensor:
    """``(..., rows, blocks, 16)`` bytes and ``(..., rows, blocks)`` exponents, transposed."""
    packed, exponents = parts
    table = torch.tensor(_FP4)
    both = torch.stack([packed & 15, packed >> 4], -1).long()
    values = table[both].flatten(-2) * torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return values.flatten(-2).transpose(-1, -2).contiguous()
