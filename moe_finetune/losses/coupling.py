"""Cross-layer coupling: an expert's tokens should continue to the same experts (P1 eq. 6, F.1)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, distributed

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, ModelFacts, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import (
    blank,
    check_shapes,
    count,
    counted,
    distributed_run,
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
    transitions_EE: Tensor | None = None,
    partners_TK: Tensor | None = None,
) -> Tensor:
    """``-Σ_{e∈A} Σ_{ν∈T(e)} p_e p'_ν`` per token: p of one MoE layer, p' of the next.

    The value lies in [-1, 0]. A is the token's selection in the first layer. Without
    ``transitions_EE``, T is the ``top_k`` experts of highest probability in the next layer, the
    same for all e. With it, T(e) is the ``top_k`` largest entries of row e.

    Args:
        probs_TE: probabilities of the first layer over all experts, not renormalized after top-k;
            normalize sigmoid scores first.
        index_TK: selected experts of the first layer.
        next_probs_TE: probabilities of the next MoE layer.
        top_k: number of experts in T.
        mask_T: True where a token counts; None counts all.
        transitions_EE: strength of the transition from expert e (row) to ν (column). Carries no
            gradient.
        partners_TK: T of each token; None takes the most probable experts.

    Raises:
        ValueError: for wrong shapes, or ``top_k`` outside 1..E.

    Source: P1, eq. 6 and appendix F.1.
    """
    check_shapes(
        probs_TE=probs_TE,
        index_TK=index_TK,
        next_probs_TE=next_probs_TE,
        mask_T=mask_T,
        transitions_EE=transitions_EE,
    )
    if not 1 <= top_k <= probs_TE.shape[1]:
        raise ValueError(f"top_k is {top_k}, expected 1 to E={probs_TE.shape[1]}")
    probs_TE = counted(probs_TE, mask_T)
    next_TE = counted(next_probs_TE, mask_T)
    index_TK = blank(index_TK.long(), mask_T)
    picked_TK = probs_TE.gather(-1, index_TK)
    if transitions_EE is None:
        # T does not depend on e, so the double sum is a product of two sums.
        if partners_TK is None:
            partners_TK = most_probable(next_TE, top_k)
        mass_T = picked_TK.sum(-1) * next_TE.gather(-1, partners_TK.long()).sum(-1)
        return mean_over_tokens(-mass_T, mask_T)
    best_EK = transitions_EE.detach().topk(top_k, sorted=False).indices
    follows_EE = torch.zeros_like(transitions_EE, dtype=next_TE.dtype).scatter(-1, best_EK, 1.0)
    onward_TE = next_TE @ follows_EE.T
    mass_T = (picked_TK * onward_TE.gather(-1, index_TK)).sum(-1)
    return mean_over_tokens(-mass_T, mask_T)


def most_probable(probs_TE: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` experts (T, K) of highest probability, in any order."""
    return probs_TE.detach().topk(top_k, sorted=False).indices


@full_precision
def transition_table(
    probs_TE: Tensor, index_TK: Tensor, next_probs_TE: Tensor, mask_T: Tensor | None = None
) -> Tensor:
    """Mean joint probability ``p_e p'_ν`` (E, E) over tokens that selected e; no gradient."""
    check_shapes(probs_TE=probs_TE, index_TK=index_TK, next_probs_TE=next_probs_TE, mask_T=mask_T)
    with torch.no_grad():
        probs_TE = counted(probs_TE, mask_T)
        next_TE = counted(next_probs_TE, mask_T)
        index_TK = blank(index_TK.long(), mask_T)
        picked_TK = probs_TE.gather(-1, index_TK)
        selected_TE = torch.zeros_like(probs_TE).scatter(-1, index_TK, picked_TK)
        return selected_TE.T @ next_TE / count(mask_T, probs_TE[:, 0])


class CouplingOptions(TermOptions):
    """``decay`` is the weight of the old transition table in its running average."""

    pairing: Literal["token", "transition"] = Field(
        default="token", description="experts of the same token, or of the average transition"
    )
    decay: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="weight of the old transition table in its running average",
    )


class Coupling(Term):
    """``coupling``: joint probability of the experts taken in two adjacent MoE layers.

    With ``pairing: transition`` each upper layer keeps a running table (E, E): the exponential
    average of :func:`transition_table` over training forwards. T is read from it once per forward.
    """

    name = "coupling"
    source = "P1 eq. 6, appendix F.1"
    reads = "router probabilities of two adjacent MoE layers"
    trains = frozenset({"router"})
    needs = frozenset({"previous"})
    selection = True
    Options = CouplingOptions
    options: CouplingOptions

    def __init__(self, options: CouplingOptions):
        super().__init__(options)
        self._tables: dict[int, Tensor] = {}

    @property
    def keeps_tables(self) -> bool:
        """True with ``pairing: transition``."""
        return self.options.pairing == "transition"

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
        table_EE = partners_TK = None
        if self.options.pairing == "transition":
            # Kept for a recomputation: other forwards may move the running table meanwhile.
            def moved() -> Tensor:
                batch_EE = transition_table(
                    lower.distribution_TE, lower.index_TK, upper_TE, record.mask_T
                )
                return self._moved(record.layer, batch_EE)

            table_EE = context.kept(self.name, moved)
        else:
            partners_TK = context.kept(
                self.name, lambda: packed_index(most_probable(upper_TE, top_k), upper_TE.shape[1])
            )
        return coupling_loss(
            lower.distribution_TE,
            lower.index_TK,
            upper_TE,
            top_k,
            record.mask_T,
            table_EE,
            partners_TK,
        )

    def _moved(self, layer: int, batch_EE: Tensor) -> Tensor:
        """The running table of ``layer`` after this forward, as a new tensor."""
        old_EE = self._tables.get(layer)
        if old_EE is not None:
            batch_EE = torch.lerp(batch_EE, old_EE.to(batch_EE.device), self.options.decay)
        self._tables[layer] = batch_EE
        return batch_EE

    def reduce_over_ranks(self) -> None:
        """Average the tables over all ranks; every rank must call this between steps."""
        if not (distributed_run() and self._tables):
            return
        layers = sorted(self._tables)
        stacked_LEE = torch.stack([self._tables[layer] for layer in layers])
        distributed.all_reduce(stacked_LEE)
        stacked_LEE /= distributed.get_world_size()
        self._tables = dict(zip(layers, stacked_LEE.unbind(0), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"transitions.{layer}": table for layer, table in sorted(self._tables.items())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._tables = {int(key.rpartition(".")[2]): table for key, table in state.items()}
