"""Determinantal diversity of a token's expert outputs (P4, algorithm 2)."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from moe_finetune.losses.gram import ZERO_SQUARED, cosines, gram, squared_lengths
from moe_finetune.losses.tensors import check_shapes, counted, full_precision, mean_over_tokens
from moe_finetune.losses.term import term

EPS, SMALLEST_EPS = 1e-4, 1e-5


@full_precision
def dpp_loss(
    outputs_TKH: Tensor,
    mask_T: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """``-logdet(Ĝ + eps I)`` per token in nats, Ĝ the Gram matrix of the normalized outputs.

    The minimum, ``-K log(1 + eps)``, is reached when the K outputs are orthogonal. A zero output
    has length 0 in Ĝ and no gradient.

    Args:
        outputs_TKH: expert outputs before the routing weight.
        mask_T: True where a token counts; None counts all.
        eps: added to the diagonal; at least ``SMALLEST_EPS`` unless the outputs are float64:
            float32 can no longer factorize Ĝ of parallel outputs below that.

    Raises:
        ValueError: for wrong shapes or ``eps`` that is not positive, or too small.

    Source: P4, algorithm 2.
    """
    check_shapes(outputs_TKH=outputs_TKH, mask_T=mask_T)
    return dpp_from_gram(gram(outputs_TKH, mask_T), mask_T, eps)


@term("dpp", source="P4 algorithm 2", reads="expert outputs", trains="experts", gram="outputs")
@full_precision
def dpp_from_gram(
    gram_TKK: Tensor,
    mask_T: Tensor | None = None,
    eps: Annotated[
        float, Field(ge=SMALLEST_EPS, description="added to the Gram matrix's diagonal")
    ] = EPS,
) -> Tensor:
    """:func:`dpp_loss` from the inner products (T, K, K) of each token's outputs."""
    check_shapes(gram_TKK=gram_TKK, mask_T=mask_T)
    if not eps > 0:
        raise ValueError(f"eps is {eps}, expected a positive number")
    gram_TKK = counted(gram_TKK, mask_T)
    if eps < SMALLEST_EPS and gram_TKK.dtype != torch.float64:
        raise ValueError(f"eps is {eps}, expected at least {SMALLEST_EPS} (any with float64)")
    # The diagonal of Ĝ is 1 for any nonzero vector: set, so that rounding cannot move it.
    nonzero_TK = (squared_lengths(gram_TKK) > ZERO_SQUARED).to(gram_TKK.dtype)
    kernel_TKK = cosines(gram_TKK) + torch.diag_embed(nonzero_TK + eps)
    # `cholesky` would wait for the device to see whether it failed.
    factor_TKK, _ = torch.linalg.cholesky_ex(kernel_TKK)
    logdet_T = 2.0 * factor_TKK.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return mean_over_tokens(-logdet_T, mask_T)
