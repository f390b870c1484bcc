"""Intra-layer specialization: experts that share a token should activate differently (P1 eq. 4)."""

from torch import Tensor

from moe_finetune.losses.gram import cosines, gram
from moe_finetune.losses.tensors import check_shapes, counted, full_precision, mean_over_tokens
from moe_finetune.losses.term import term


@full_precision
def specialization_loss(activations_TKD: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """``Σ_{e≠ν} cos²(z_e, z_ν)`` per token, over ordered pairs of selected experts.

    The paper's sum includes ``e = ν``, a constant K that is dropped.

    Args:
        activations_TKD: activations after the gate and before the down projection. A zero vector
            has cosine 0 with anything.
        mask_T: True where a token counts; None counts all.

    Raises:
        ValueError: for wrong shapes.

    Source: P1, eq. 4.
    """
    check_shapes(activations_TKD=activations_TKD, mask_T=mask_T)
    return specialization_from_gram(gram(activations_TKD, mask_T), mask_T)


@term(
    "specialization",
    source="P1 eq. 4",
    reads="expert activations",
    trains="experts",
    gram="activations",
)
@full_precision
def specialization_from_gram(gram_TKK: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """:func:`specialization_loss` from the inner products ``⟨z_e, z_ν⟩`` of each token."""
    check_shapes(gram_TKK=gram_TKK, mask_T=mask_T)
    cosines_TKK = cosines(counted(gram_TKK, mask_T))
    return mean_over_tokens(cosines_TKK.square().sum((-1, -2)), mask_T)
