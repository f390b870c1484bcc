"""P0's losses as its authors' public code computes them, which differs from the paper.

Reimplemented from the code's arithmetic; ``recipes/papers/p0_expert_specialization.md`` compares
paper and code point by point. T tokens, E routed experts, K selected, H hidden.
"""

import torch
from pydantic import Field
from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, ModelFacts, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord
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


def grouped_by_expert(outputs_TKH: Tensor, index_TK: Tensor, mask_T: Tensor | None) -> Tensor:
    """All outputs sorted by expert and cut into groups of K.

    The authors' code concatenates outputs expert by expert and views them as (tokens, K, H), so
    nearly every group has K tokens of one expert instead of K experts of one token. Tokens that do
    not count are dropped.
    """
    if mask_T is not None:
        keep_T = mask_T.to(torch.bool)
        outputs_TKH, index_TK = outputs_TKH[keep_T], index_TK[keep_T]
    order_N = index_TK.flatten().argsort(stable=True)
    return outputs_TKH.flatten(0, 1)[order_N].view_as(outputs_TKH)


@torch.no_grad()
def router_row_overlap(router_weight_EH: Tensor, top_k: int) -> Tensor:
    """Squared projection on the span of all other rows, mean over the first ``top_k`` rows.

    The authors' code derives the weight of the loss on outputs from this value.
    """
    rows_EH = router_weight_EH.double()
    squares = []
    for row in range(top_k):
        others_HX = torch.cat([rows_EH[:row], rows_EH[row + 1 :]]).T
        basis_HX = torch.linalg.qr(others_HX).Q
        squares.append((rows_EH[row] @ basis_HX).square().sum())
    return torch.stack(squares).mean()


class SoftmaxVariance(Term):
    """``softmax_variance``: spread of a token's probabilities before top-k."""

    name = "softmax_variance"
    source = "P0's released code"
    reads = "router logits"
    trains = frozenset({"router"})

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        # Softmax for every family: the authors' code runs Moonlight with softmax scores, too.
        return softmax_variance_loss(record.logits_TE, record.mask_T)


class SpanOrthogonalityOptions(TermOptions):
    """Options of :func:`span_orthogonality_loss`."""

    eps: float = Field(default=EPS, gt=0, description="added to a basis vector's length")
    group_by_expert: bool = Field(
        default=False,
        description="group K outputs of one expert, as the released code's reshape does, instead "
        "of the K outputs of one token",
    )


class SpanOrthogonality(Term):
    """``span_orthogonality``: the part of each output in the span of the others."""

    name = "span_orthogonality"
    source = "P0's released code"
    reads = "expert outputs"
    trains = frozenset({"experts"})
    needs = frozenset({"outputs"})
    Options = SpanOrthogonalityOptions
    options: SpanOrthogonalityOptions

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        if facts.top_k < 2:
            raise ObjectiveError(
                f"method.terms.{self.name}: a token has only one expert, so there are no others "
                "to project on; remove the term (weight: 0)"
            )

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        outputs_TKH, mask_T = record.outputs_TKH, record.mask_T
        assert outputs_TKH is not None
        if self.options.group_by_expert:
            outputs_TKH = grouped_by_expert(outputs_TKH, record.index_TK, mask_T)
            return span_orthogonality_loss(outputs_TKH, None, self.options.eps)
        return span_orthogonality_loss(outputs_TKH, mask_T, self.options.eps)

    def target_value(self, record: RoutingRecord, value: Tensor) -> Tensor:
        assert record.router_weight_EH is not None
        return router_row_overlap(record.router_weight_EH.detach(), record.index_TK.shape[1])
