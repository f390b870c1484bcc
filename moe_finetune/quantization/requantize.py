"""Pack float weights into a checkpoint's own quantized format.

Values are rounded to nearest. Each block gets the scale with the least squared error among the
stored scale and those derived from its largest magnitude. An unchanged value is on the stored
scale's grid, so an unchanged block keeps its bytes, and no block has a larger error than with its
stored bytes.

Shape legend: R rows and C columns of a matrix, n values that share a scale.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of a 4-bit float (E2M1)."""
_FP4_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP8_LARGEST = 448.0
_EXPONENT_BIAS = 127

Round = Callable[[Tensor], Tensor]


def pack_fp8(values_RC: Tensor, stored: list[Tensor], rows: int, columns: int) -> list[Tensor]:
    """Return 8-bit floats (R, C) and a scale for each block of ``rows`` x ``columns``.

    Args:
        values_RC: float32.
        stored: the parts as they were.
    """
    scale = stored[1]
    height, width = values_RC.shape
    padded = pad(values_RC, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    largest = blocks.abs().amax((2, 3))
    chosen, digits = _nearest(
        blocks.flatten(2), [scale.float(), _as_stored(largest / _FP8_LARGEST, scale)], _round_fp8
    )
    tiled = digits.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
    return [tiled[:height, :width].to(torch.float8_e4m3fn), chosen.to(scale.dtype)]


def pack_int4(values_RC: Tensor, stored: list[Tensor]) -> list[Tensor]:
    """Return 4-bit integers, eight per int32, a scale for each group of a row, and the shape.

    Args:
        values_RC: float32.
        stored: the parts as they were.
    """
    _, scale, shape = stored
    blocks = values_RC.unflatten(1, (scale.shape[1], -1))
    largest = blocks.abs().amax(2)
    # compressed-tensors' own scale spreads the 16 steps over both signs; 7 keeps the largest value.
    candidates = [scale.float(), *(_as_stored(largest / most, scale) for most in (7.5, 7.0))]
    chosen, digits = _nearest(blocks, candidates, _round_int4)
    codes = (digits.flatten(1) + 8).to(torch.int64)
    codes = pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    packed = (codes << torch.arange(0, 32, 4)).sum(2)
    return [_wrapped(packed), chosen.to(scale.dtype), shape]


def pack_mxfp4(values: Tensor, stored: list[Tensor]) -> list[Tensor]:
    """Return 4-bit floats in blocks of 32, two per byte, and exponents; packed rows are columns.

    Args:
        values: float32 (..., C, R).
        stored: the stored parts: (..., R, C / 32, 16) and (..., R, C / 32).
    """
    exponents = stored[1]
    blocks = values.transpose(-1, -2).unflatten(-1, (exponents.shape[-1], -1))
    # The largest magnitude is below 2 ** order, and the largest code is 1.5 * 2 ** 2.
    order = torch.frexp(blocks.abs().amax(-1)).exponent
    biased = [exponents.int(), *(order - less + _EXPONENT_BIAS for less in (3, 2))]
    biased = [each.clamp(0, 254) for each in biased]
    scales = [torch.exp2(each.float() - _EXPONENT_BIAS) for each in biased]
    chosen, digits = _nearest(blocks, scales, _round_fp4)
    codes = _fp4_codes(digits).flatten(-1).unflatten(-1, (-1, 2)).view(*exponents.shape, -1, 2)
    packed = codes[..., 0] | codes[..., 1] << 4
    exponent = torch.frexp(chosen).exponent - 1 + _EXPONENT_BIAS
    return [packed.to(torch.uint8), exponent.to(torch.uint8)]


def _nearest(blocks: Tensor, scales: list[Tensor], rounded: Round) -> tuple[Tensor, Tensor]:
    """The best scale (...) and its digits (..., n) for each block (..., n); first among ties."""
    best = torch.full(blocks.shape[:-1], torch.inf)
    chosen, digits = scales[0], torch.zeros_like(blocks)
    for scale in scales:
        divisor = torch.where(scale == 0, torch.inf, scale).unsqueeze(-1)
        candidate = rounded(blocks / divisor)
        error = (candidate * scale.unsqueeze(-1) - blocks).square_().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better, scale, chosen)
        digits = torch.where(better.unsqueeze(-1), candidate, digits)
    return chosen, digits


def _as_stored(scale: Tensor, stored: Tensor) -> Tensor:
    """A scale rounded as it will be stored; one that overflows is never selected."""
    return scale.to(stored.dtype).float()


def _round_fp8(digits: Tensor) -> Tensor:
    return digits.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float()


def _round_int4(digits: Tensor) -> Tensor:
    return digits.round().clamp_(-8, 7)


def _round_fp4(digits: Tensor) -> Tensor:
    return torch.tensor(FP4)[_fp4_codes(digits)]


def _fp4_codes(digits: Tensor) -> Tensor:
    codes = torch.bucketize(digits.abs().contiguous(), torch.tensor(_FP4_MIDDLES))
    return codes + 8 * torch.signbit(digits)


def _wrapped(unsigned: Tensor) -> Tensor:
    """Integers below 2 ** 32 as int32 with the same bits."""
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)
