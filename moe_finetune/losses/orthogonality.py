"""Orthogonality of a token's expert outputs (P0 eq. 25 and 28; P4 §6.2)."""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from moe_finetune.losses.gram import gram, inverse_lengths, off_diagonal, squared_lengths
from moe_finetune.losses.tensors import (
    at_least_float32,
    check_choice,
    check_shapes,
    counted,
    full_precision,
    mean_over_tokens,
)
from moe_finetune.losses.term import term

Form = Literal["projection", "cosine"]
EPS = 1e-8


@full_precision
def orthogonality_loss(
    outputs_TKH: Tensor,
    scores_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
    form: Form = "projection",
    tau_gate: float = 0.0,
    eps: float = EPS,
) -> Tensor:
    """Squared overlap of a token's expert outputs over ordered pairs, mean over tokens.

    ``projection``: ``Σ_{j≠k} ‖proj_{y_k}(y_j)‖² = Σ_{j≠k} ⟨y_j,y_k⟩² ‖y_k‖² / (‖y_k‖² + eps)²``,
    in squared units of the outputs. ``cosine``: ``Σ_{j≠k} cos²(y_j, y_k)``, where a zero vector
    has cosine 0 with anything and ``eps`` is not used.

    Args:
        outputs_TKH: expert outputs before the routing weight.
        scores_TK: scores of the selected experts; only pairs whose two scores are above
            ``tau_gate`` count. None counts all pairs.
        mask_T: True where a token counts; None counts all.
        form: "projection" or "cosine".
        tau_gate: threshold of the scores.
        eps: added to the squared length in the denominator.

    Raises:
        ValueError: for wrong shapes or an unknown form.
    """
    check_shapes(outputs_TKH=outputs_TKH, scores_TK=scores_TK, mask_T=mask_T)
    gram_TKK = gram(outputs_TKH, mask_T)
    return orthogonality_from_gram(gram_TKK, scores_TK, mask_T, form, tau_gate, eps)


@term(
    "orthogonality",
    source="P0 eq. 25, 28; P4 §6.2",
    reads="expert outputs",
    trains="experts",
    gram="outputs",
)
@full_precision
def orthogonality_from_gram(
    gram_TKK: Tensor,
    scores_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
    form: Annotated[
        Form, Field(description="squared projections, or squared cosines")
    ] = "projection",
    tau_gate: Annotated[
        float, Field(ge=0, lt=1, description="drop selected experts with at most this weight")
    ] = 0.0,
    eps: Annotated[
        float, Field(gt=0, description="added to the squared length that `projection` divides by")
    ] = EPS,
) -> Tensor:
    """:func:`orthogonality_loss` from the inner products ``⟨y_j, y_k⟩`` of each token."""
    check_shapes(gram_TKK=gram_TKK, scores_TK=scores_TK, mask_T=mask_T)
    gram_TKK = counted(gram_TKK, mask_T)
    pairs_TKK = off_diagonal(_overlap(gram_TKK, form, eps))
    if scores_TK is not None:
        # In 16 bits the threshold itself would be rounded.
        above_TK = at_least_float32(scores_TK) > tau_gate
        both_TKK = above_TK.unsqueeze(-1) & above_TK.unsqueeze(-2)
        pairs_TKK = pairs_TKK.masked_fill(~both_TKK, 0.0)
    return mean_over_tokens(pairs_TKK.sum((-1, -2)), mask_T)


def _overlap(gram_TKK: Tensor, form: Form, eps: float) -> Tensor:
    check_choice("form", form, ("projection", "cosine"))
    squared_TK = squared_lengths(gram_TKK)
    if form == "projection":
        squared_k_TK = squared_TK.unsqueeze(-2)
        # Divide before squaring: the fourth power of a length can leave float32.
        return (gram_TKK / (squared_k_TK + eps)).square() * squared_k_TK
    inverse_TK = inverse_lengths(squared_TK)
    return (gram_TKK * inverse_TK.unsqueeze(-1) * inverse_TK.unsqueeze(-2)).square()
