"""Routing variance: makes each expert's scores vary over tokens (P0 eq. 7)."""

from torch import Tensor

from moe_finetune.losses.tensors import (
    check_shapes,
    count,
    counted,
    full_precision,
    mean_over_tokens,
)
from moe_finetune.losses.term import term


@term("variance", source="P0 eq. 7", reads="router scores after top-k", trains="router")
@full_precision
def variance_loss(scores_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """``-(1/E) Σ_e (s_te - s̄_e)²`` per token, ``s̄_e`` the mean over the tokens that count.

    Args:
        scores_TE: scores after top-k: rows sum to 1, zeros where an expert was not selected.
        mask_T: True where a token counts; None counts all.

    Raises:
        ValueError: for wrong shapes.

    Source: *Advancing Expert Specialization for Better MoE* (arXiv 2505.22323), eq. 7.
    """
    check_shapes(scores_TE=scores_TE, mask_T=mask_T)
    scores_TE = counted(scores_TE, mask_T)
    mean_E = scores_TE.sum(0) / count(mask_T, scores_TE)
    return mean_over_tokens(-(scores_TE - mean_E).square().mean(-1), mask_T)
