"""The number format of frozen weights, through bitsandbytes' kernels on CPUs and GPUs.

``nf4``: 4 bits per weight, 16 quantiles of a normal distribution, scaled by the largest magnitude
among 64 consecutive weights; 4.5 bits with scales (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).
Each matrix is quantized separately: no block spans two experts.
"""

import functools
import logging
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_finetune.errors import DependencyError, RecipeError, did_you_mean

NF4 = "nf4"
BLOCK = 64
"""Number of weights that share a float32 scale."""
BITS = 4 + 32 / BLOCK
"""Per weight, with its share of a scale."""


def check_format(name: str | None, key: str = "quantization") -> bool:
    """Return whether weights are to be quantized: whether ``name`` is not None or "none"."""
    if name in (None, "none"):
        return False
    if name != NF4:
        raise RecipeError(f"{key}: unknown format '{name}'{did_you_mean(str(name), ['none', NF4])}")
    bitsandbytes()
    return True


@functools.cache
def bitsandbytes() -> Any:
    """Import bitsandbytes, which registers its kernels with torch."""
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


def packed_shapes(rows: int, columns: int) -> tuple[int, int]:
    """Numbers of packed bytes and of float32 scales of one matrix."""
    blocks = math.ceil(rows * columns / BLOCK)
    return blocks * BLOCK // 2, blocks


def quantize(matrix_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Packed bytes and float32 scales of one float matrix, both flat; see :func:`packed_shapes`."""
    flat = matrix_RC.reshape(-1)
    flat = pad(flat, (0, -flat.numel() % BLOCK))
    functional = bitsandbytes().functional
    packed, state = functional.quantize_4bit(flat, blocksize=BLOCK, quant_type=NF4)
    return packed.reshape(-1), state.absmax


def dequantize(
    packed_nP: Tensor, scales_nB: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Matrices ``(n, rows, columns)`` in ``dtype`` from their packed bytes and scales."""
    count, padded = packed_nP.shape[0], packed_nP.shape[1] * 2
    flat: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed_nP, scales_nB, BLOCK, NF4, (count, padded), dtype
    )
    return flat[:, : rows * columns].view(count, rows, columns)
