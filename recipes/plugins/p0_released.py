"""P0's losses as its authors' public code has them (November 2025), which differs from the paper.

Reimplemented from the code's arithmetic; recipes/papers/p0_expert_specialization.md compares paper
and code point by point. Its weights are found in the first forward: the power of ten nearest to
target / value. T tokens, E routed experts, K selected, H hidden.

    moe-finetune train ... recipes/methods/orthogonal_variance_released.yaml \
      --plugin recipes/plugins/p0_released.py
"""

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import TERMS, LayerContext, ModelFacts, Term, TermOptions
from moe_finetune.losses.presets import PRESETS, Preset
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.released import EPS, softmax_variance_loss, span_orthogonality_loss


class VarianceOptions(TermOptions):
    """Without weight and share, training finds the weight from ``target``."""

    finds_first_weight: ClassVar[bool] = True
    target: float = Field(default=1e-3, gt=0, description="of the weighted first value")


class SoftmaxVariance(Term):
    """``softmax_variance``: spread of a token's probabilities before top-k."""

    name = "softmax_variance"
    source = "P0's released code"
    reads = "router logits"
    trains = frozenset({"router"})
    Options = VarianceOptions
    options: VarianceOptions

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        # Softmax for every family: the authors' code runs Moonlight with softmax scores, too.
        return softmax_variance_loss(record.logits_TE, record.mask_T)

    def first_weight(self, record: RoutingRecord, value: Tensor) -> float:
        return nearest_power_of_ten(self.options.target, abs(float(value)))


class OrthogonalityOptions(TermOptions):
    """Options of :func:`span_orthogonality_loss`, and what its weight is found from."""

    finds_first_weight: ClassVar[bool] = True
    target: float = Field(default=1e-4, gt=0, description="of the weighted overlap of router rows")
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
    Options = OrthogonalityOptions
    options: OrthogonalityOptions

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

    def first_weight(self, record: RoutingRecord, value: Tensor) -> float:
        # Not from the value: the authors' code takes the overlap of the router's rows.
        overlap = router_row_overlap(record.router_weight_EH, record.index_TK.shape[1])
        return nearest_power_of_ten(self.options.target, float(overlap))


def nearest_power_of_ten(target: float, size: float) -> float:
    """The power of ten nearest to ``target / size``; NaN where there is none."""
    if not 0 < size < math.inf:
        return math.nan
    return 10.0 ** round(math.log10(target / size))


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
    """Squared projection on the span of all other rows, mean over the first ``top_k`` rows."""
    rows_EH = router_weight_EH.double()
    squares = []
    for row in range(top_k):
        others_HX = torch.cat([rows_EH[:row], rows_EH[row + 1 :]]).T
        basis_HX = torch.linalg.qr(others_HX).Q
        squares.append((rows_EH[row] @ basis_HX).square().sum())
    return torch.stack(squares).mean()


for kind in (SoftmaxVariance, SpanOrthogonality):
    TERMS.register(kind.name, kind)

PRESETS.register(
    "orthogonal_variance_released",
    Preset(
        "orthogonal_variance_released",
        terms={
            "load_balance": {"weight": 1e-3, "variant": "deepseek", "scope": "sequence"},
            "span_orthogonality": {},
            "softmax_variance": {},
        },
        source="P0's authors' code (November 2025), which differs from the paper",
        shows="score variance above aux_loss",
        goal=("score_variance", 1),
    ),
)
