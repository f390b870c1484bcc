"""Negative correlation of a token's expert outputs (P4, algorithm 3, without its label term)."""

import warnings
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from moe_finetune.losses.gram import ZERO_SQUARED, gram, lengths, squared_lengths
from moe_finetune.losses.tensors import check_shapes, counted, full_precision, mean_over_tokens
from moe_finetune.losses.term import term


def _bounded(normalize: bool) -> bool:
    if not normalize:
        warnings.warn(
            "method.terms.ncl.normalize: false leaves the loss unbounded below; "
            "it falls as the outputs grow",
            stacklevel=2,
        )
    return normalize


@full_precision
def ncl_loss(
    outputs_TKH: Tensor,
    mask_T: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """``Σ_i d_i·Σ_{j≠i} d_j = -Σ_i ‖d_i‖²`` per token, ``d_i = y_i - mean_j y_j``.

    Args:
        outputs_TKH: expert outputs before the routing weight.
        mask_T: True where a token counts; None counts all.
        normalize: first divide the outputs by the token's mean output norm, gradient included (our
            addition); the value is then in ``[-K², 0]`` and independent of the outputs' scale.
            Without it the loss is the paper's and **unbounded below**: larger outputs lower it.

    Raises:
        ValueError: for wrong shapes.

    Source: P4, algorithm 3, without its label term.
    """
    check_shapes(outputs_TKH=outputs_TKH, mask_T=mask_T)
    return ncl_from_gram(gram(outputs_TKH, mask_T), mask_T, normalize)


@term(
    "ncl",
    source="P4 algorithm 3 without its label term",
    reads="expert outputs",
    trains="experts",
    gram="outputs",
)
@full_precision
def ncl_from_gram(
    gram_TKK: Tensor,
    mask_T: Tensor | None = None,
    normalize: Annotated[
        bool,
        Field(description="outputs are divided by the mean norm of the token's outputs first"),
        AfterValidator(_bounded),
    ] = True,
) -> Tensor:
    """:func:`ncl_loss` from inner products: ``Σ‖d_i‖² = tr G - (Σ_jk G_jk) / K``."""
    check_shapes(gram_TKK=gram_TKK, mask_T=mask_T)
    gram_TKK = counted(gram_TKK, mask_T)
    # The d_i sum to 0, so Σ_{j≠i} d_j = -d_i; and Σ‖y_i - ȳ‖² = Σ‖y_i‖² - K‖ȳ‖².
    squared_TK = squared_lengths(gram_TKK)
    spread_T = squared_TK.sum(-1) - gram_TKK.sum((-1, -2)) / gram_TKK.shape[-1]
    if normalize:
        scale_T = lengths(squared_TK).mean(-1).square()
        nonzero_T = scale_T > ZERO_SQUARED
        spread_T = torch.where(nonzero_T, spread_T / torch.where(nonzero_T, scale_T, 1.0), 0.0)
    return mean_over_tokens(-spread_T, mask_T)
