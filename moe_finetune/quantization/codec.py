"""Two number formats for frozen weights, through bitsandbytes' kernels on CPUs and GPUs.

- ``nf4``: 4 bits per weight, 16 quantiles of a normal distribution, scaled by the largest magnitude
  among 64 consecutive weights; 4.5 bits with scales (QLoRA, Dettmers et al. 2023, arXiv
  2305.14314).
- ``int8``: 8 bits per weight, scaled by the largest magnitude in its row (LLM.int8, Dettmers et al.
  2022, arXiv 2208.07339). Activations are not rounded.

Each matrix is quantized separately: no block spans two experts.
"""

import functools
import logging
import math
import sys
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_finetune.errors import DependencyError, RecipeError, did_you_mean

Kind = Literal["nf4", "int8"]
BLOCK = 64
"""Number of weights that share a scale in ``nf4``."""


def check_kind(kind: str | None, key: str = "quantization") -> Kind | None:
    """Return ``kind``, or None for "none".

    Raises:
        RecipeError: an unknown format.
        DependencyError: bitsandbytes cannot be used here.
    """
    if kind in (None, "none"):
        return None
    if kind not in get_args(Kind):
        formats = ("none", *get_args(Kind))
        raise RecipeError(f"{key}: unknown format '{kind}'{did_you_mean(str(kind), formats)}")
    bitsandbytes()
    return kind  # type: ignore[return-value]


@functools.cache
def bitsandbytes() -> Any:
    """Import bitsandbytes, which registers its kernels with torch.

    Raises:
        DependencyError: it is not installed or cannot be imported.
    """
    noisy = logging.getLogger("bitsandbytes")
    level, kernels = noisy.level, sys.modules.get("kernels")
    # On some processors its import fetches a kernel from the hub and runs it, where the package
    # `kernels` is installed; code from the hub is never executed. It does without.
    sys.modules["kernels"] = None  # type: ignore[assignment]
    noisy.setLevel(logging.ERROR)
    try:
        import bitsandbytes as library
    except Exception as error:  # ImportError, or what its native library raises while it loads
        raise DependencyError(
            f"quantization needs bitsandbytes, which cannot be imported here ({error}); install it "
            "(pip install bitsandbytes), or set model.quantization: none"
        ) from error
    finally:
        noisy.setLevel(level)
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return library


def packed_shapes(kind: Kind, rows: int, columns: int) -> tuple[int, int]:
    """Numbers of packed bytes and of float32 scales of one matrix."""
    if kind == "int8":
        return rows * columns, rows
    blocks = math.ceil(rows * columns / BLOCK)
    return blocks * BLOCK // 2, blocks


def quantize(matrix_RC: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Packed bytes and float32 scales of one float matrix, both flat; see :func:`packed_shapes`."""
    library = bitsandbytes()
    if kind == "int8":
        # The GPU kernel takes only this dtype: 11 significant bits, of which 8 remain.
        packed, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(matrix_RC.half(), 0.0)
        packed.masked_fill_((scales == 0).unsqueeze(1), 0)  # a row of zeros was divided by 0
        return packed.reshape(-1), scales.reshape(-1)
    flat = matrix_RC.reshape(-1)
    flat = pad(flat, (0, -flat.numel() % BLOCK))
    packed, state = library.functional.quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")
    return packed.reshape(-1), state.absmax


def dequantize(
    packed_nP: Tensor, scales_nB: Tensor, rows: int, columns: int, kind: Kind, dtype: torch.dtype
) -> Tensor:
    """Matrices ``(n, rows, columns)`` in ``dtype`` from their packed bytes and scales."""
    count = packed_nP.shape[0]
    if kind == "int8":
        values_nRC = packed_nP.view(count, rows, columns).to(dtype)
        return values_nRC.mul_((scales_nB / 127.0).to(dtype).unsqueeze(2))
    padded = packed_nP.shape[1] * 2
    flat: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed_nP, scales_nB, BLOCK, "nf4", (count, padded), dtype
    )
    return flat[:, : rows * columns].view(count, rows, columns)
