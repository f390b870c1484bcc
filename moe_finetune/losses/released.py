"""P0's losses as its authors' code has them; terms: recipes/plugins/p0_released.py."""

import torch
from torch import Tensor

from moe_finetune.losses.tensors import (
    at_least_float32,
    check_shapes,
    counted,
    full_precision,
    mean_over_tokens,
)

EPS = 1e-6
"""Added to the norm by which a basis vector is divided."""


@full_precision
def softmax_variance_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """``-Var_e softmax(logits_t)_e``, mean over tokens; the variance divides by E - 1.

    The variance is over all experts of a token, before top-k. P0's eq. 7 is over tokens, after
    top-k.

    Raises:
        ValueError: for wrong shapes.
    """
    check_shapes(logits_TE=logits_TE, mask_T=mask_T)
    probs_TE = counted(logits_TE, mask_T).softmax(-1)
    squares_TE = (probs_TE - probs_TE.mean(-1, keepdim=True)).square()
    return mean_over_tokens(-squares_TE.sum(-1) / (probs_TE.shape[-1] - 1), mask_T)


@full_precision
def span_orthogonality_loss(
    outputs_TKH: Tensor,
    mask_T: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """``1/K Σ_k ‖projection of y_k on the span of the token's other outputs‖²``, mean over tokens.

    The basis comes from Gram-Schmidt, with each vector divided by (its length + ``eps``). P0's eq.
    25 projects on one other output at a time.

    Raises:
        ValueError: for wrong shapes.
    """
    check_shapes(outputs_TKH=outputs_TKH, mask_T=mask_T)
    # A basis vector is a combination of the outputs, so K numbers stand for H. What is left of a
    # nearly dependent output is a difference of inner products: float64 keeps its digits.
    vectors_TKH = counted(outputs_TKH, mask_T).double()
    gram_TKK = vectors_TKH @ vectors_TKH.transpose(-1, -2)
    chosen = gram_TKK.shape[-1]
    unit_KK = torch.eye(chosen, dtype=gram_TKK.dtype, device=gram_TKK.device)

    def inner(a_TK: Tensor, b_TK: Tensor) -> Tensor:
        return ((a_TK.unsqueeze(-2) @ gram_TKK).squeeze(-2) * b_TK).sum(-1, keepdim=True)

    total_T = gram_TKK.new_zeros(gram_TKK.shape[0])
    for k in range(chosen):
        basis: list[Tensor] = []
        for other in (j for j in range(chosen) if j != k):
            rest_TK = unit_KK[other].expand(gram_TKK.shape[0], chosen)
            for direction_TK in basis:
                rest_TK = rest_TK - inner(direction_TK, rest_TK) * direction_TK
            squared_T1 = inner(rest_TK, rest_TK).clamp_min(0)
            nonzero_T1 = squared_T1 > 0  # the length of a zero vector has no gradient
            length_T1 = torch.where(nonzero_T1, squared_T1, 1.0).sqrt() * nonzero_T1
            basis.append(rest_TK / (length_T1 + eps))
        for direction_TK in basis:
            along_T1 = inner(direction_TK, unit_KK[k].expand_as(direction_TK))
            total_T = total_T + (along_T1.square() * inner(direction_TK, direction_TK)).squeeze(-1)
    loss = mean_over_tokens(total_T / chosen, mask_T)
    return loss.to(at_least_float32(outputs_TKH[:0]).dtype)
