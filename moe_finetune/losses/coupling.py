"""Cross-layer coupling: an expert's tokens should continue to the same experts (P1 eq. 6)."""

from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, ModelFacts, Term
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import (
    blank,
    check_shapes,
    counted,
    full_precision,
    mean_over_tokens,
    packed_index,
)


@full_precision
def coupling_loss(
    probs_TE: Tensor,
    index_TK: Tensor,
    next_probs_TE: Tensor,
    top_k: int,
    mask_T: Tensor | None = None,
    partners_TK: Tensor | None = None,
) -> Tensor:
    """``-Σ_{e∈A} Σ_{ν∈T(e)} p_e p'_ν`` per token: p of one MoE layer, p' of the next.

    The value lies in [-1, 0]. A is the token's selection in the first layer, T the ``top_k``
    experts of highest probability in the next layer, the same for all e.

    Args:
        probs_TE: probabilities of the first layer over all experts, not renormalized after top-k;
            normalize sigmoid scores first.
        index_TK: selected experts of the first layer.
        next_probs_TE: probabilities of the next MoE layer.
        top_k: number of experts in T.
        mask_T: True where a token counts; None counts all.
        partners_TK: T of each token; None takes the most probable experts.

    Raises:
        ValueError: for wrong shapes, or ``top_k`` outside 1..E.

    Source: P1, eq. 6.
    """
    check_shapes(
        probs_TE=probs_TE,
        index_TK=index_TK,
        next_probs_TE=next_probs_TE,
        mask_T=mask_T,
    )
    if not 1 <= top_k <= probs_TE.shape[1]:
        raise ValueError(f"top_k is {top_k}, expected 1 to E={probs_TE.shape[1]}")
    probs_TE = counted(probs_TE, mask_T)
    next_TE = counted(next_probs_TE, mask_T)
    index_TK = blank(index_TK.long(), mask_T)
    picked_TK = probs_TE.gather(-1, index_TK)
    if partners_TK is None:
        partners_TK = most_probable(next_TE, top_k)
    # T does not depend on e, so the double sum is a product of two sums.
    mass_T = picked_TK.sum(-1) * next_TE.gather(-1, partners_TK.long()).sum(-1)
    return mean_over_tokens(-mass_T, mask_T)


def most_probable(probs_TE: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` experts (T, K) of highest probability, in any order."""
    return probs_TE.detach().topk(top_k, sorted=False).indices


class Coupling(Term):
    """``coupling``: joint probability of the experts taken in two adjacent MoE layers."""

    name = "coupling"
    source = "P1 eq. 6"
    reads = "router probabilities of two adjacent MoE layers"
    trains = frozenset({"router"})
    needs = frozenset({"previous"})
    selection = True

    def layers(self, facts: ModelFacts) -> tuple[int, ...]:
        """The upper layers of the pairs: all MoE layers but the first."""
        return facts.moe_layers[1:]

    def check(self, facts: ModelFacts) -> None:
        """Refuse a model, or a choice of layers, without a pair of MoE layers."""
        super().check(facts)
        if len(facts.moe_layers) < 2:
            raise ObjectiveError(
                "method.terms.coupling joins two MoE layers, but this model has "
                f"{len(facts.moe_layers)}; remove the term"
            )
        if not any(self.applies(layer) for layer in facts.moe_layers[1:]):
            raise ObjectiveError(
                f"method.terms.coupling.layers: {self.options.layers} contains only the first "
                f"MoE layer, which has none below it; add one of {list(facts.moe_layers[1:])}"
            )

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor | None:
        """The coupling of this layer with the MoE layer below; None in the first MoE layer."""
        lower = context.previous
        if lower is None:
            return None
        upper_TE = record.distribution_TE
        top_k = record.index_TK.shape[1]
        partners_TK = context.kept(
            self.name, lambda: packed_index(most_probable(upper_TE, top_k), upper_TE.shape[1])
        )
        return coupling_loss(
            lower.distribution_TE, lower.index_TK, upper_TE, top_k, record.mask_T, partners_TK
        )
