"""Geometry of a token's K vectors from inner products: K x K numbers per token, not K x H."""

import torch
from torch import Tensor

from moe_finetune.losses.tensors import counted, full_precision

# Squared length below which a vector counts as zero: cosines and their gradients stay finite
# in float32 above it.
ZERO_SQUARED = 1e-24


@full_precision
def gram(vectors_TKX: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Inner products ``(T, K, K)`` of each token's vectors, at least float32, 0 where masked."""
    wide = counted(vectors_TKX, mask_T)
    return wide @ wide.transpose(-1, -2)


def squared_lengths(gram_TKK: Tensor) -> Tensor:
    """``‖v_k‖²`` (T, K), the diagonal."""
    return gram_TKK.diagonal(dim1=-2, dim2=-1)


def inverse_lengths(squared_TK: Tensor) -> Tensor:
    """``1 / ‖v‖`` (T, K); 0 with zero gradient for a zero vector."""
    nonzero = squared_TK > ZERO_SQUARED
    return torch.where(nonzero, torch.where(nonzero, squared_TK, 1.0).rsqrt(), 0.0)


def lengths(squared_TK: Tensor) -> Tensor:
    """``‖v‖`` (T, K), with zero gradient for a zero vector."""
    nonzero = squared_TK > ZERO_SQUARED
    return torch.where(nonzero, torch.where(nonzero, squared_TK, 1.0).sqrt(), 0.0)


def off_diagonal(square_TKK: Tensor) -> Tensor:
    """The matrices (T, K, K) with zeros on their diagonals."""
    eye_KK = torch.eye(square_TKK.shape[-1], dtype=torch.bool, device=square_TKK.device)
    return square_TKK.masked_fill(eye_KK, 0.0)


def cosines(gram_TKK: Tensor) -> Tensor:
    """Cosines (T, K, K) of all pairs, 0 on the diagonal and for pairs with a zero vector."""
    inverse_TK = inverse_lengths(squared_lengths(gram_TKK))
    return off_diagonal(gram_TKK * inverse_TK.unsqueeze(-1) * inverse_TK.unsqueeze(-2))
