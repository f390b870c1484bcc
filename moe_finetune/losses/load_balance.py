"""Load balancing: Switch, DeepSeek and GShard forms, per sequence, micro-batch or global batch."""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, distributed

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import (
    blank,
    check_choice,
    check_shapes,
    counted,
    distributed_run,
    full_precision,
    on_host,
    packed_index,
    world_size,
)

Variant = Literal["switch", "deepseek", "gshard"]
Probabilities = Literal["all", "topk"]


@full_precision
def load_balancing_loss(
    probs_TE: Tensor,
    index_TK: Tensor,
    mask_T: Tensor | None = None,
    variant: Variant = "switch",
    sequence_lengths: Tensor | None = None,
    *,
    probabilities: Probabilities = "all",
    rank_totals: Tensor | None = None,
    first_T: Tensor | None = None,
) -> Tensor:
    """``E Σ_e f_e P_e``: 1 at perfect balance (``switch``: K), larger when load concentrates.

    ``f_e``, the share of tokens that select expert e, carries no gradient; ``P_e`` is the mean
    probability of e. The loss is linear in the probabilities and is computed as their product with
    constant coefficients.

    Args:
        probs_TE: probabilities before top-k, used without normalization: normalize sigmoid scores
            first.
        index_TK: selected experts, in any order.
        mask_T: True where a token counts; None counts all.
        variant: "switch" as written; "deepseek" divided by K; "gshard" with ``f_e`` from the first
            choice only, the selected expert of highest probability (lowest id among equals).
        sequence_lengths: tokens of each sequence, summing to T: the loss is then the mean of the
            sequences' values (DeepSeek's ``seq_aux``), without sequences in which no token counts.
            None pools all tokens.
        probabilities: "all", or "topk" for selected ones renormalized to sum to 1 (P0 eq. 2).
        rank_totals: the result of :func:`load_totals`, summed over data-parallel ranks. ``f`` and
            ``P`` then cover all ranks (Qiu et al. 2025), the value is equal on every rank, and the
            mean over ranks of the gradients equals the gradient of one process with all tokens.
            Cannot be combined with ``sequence_lengths``.
        first_T: first choices for "gshard"; None takes those of highest probability.

    Raises:
        ValueError: for wrong shapes, an unknown variant, or lengths that do not sum to T.

    Source: GShard (Lepikhin et al. 2020), Switch Transformer eq. 4, DeepSeek-V2 eq. 23; P0 eq. 18.
    """
    check_shapes(probs_TE=probs_TE, index_TK=index_TK, mask_T=mask_T)
    probs_TE, chosen_TC, counts_T = _prepare(
        probs_TE, index_TK, mask_T, variant, probabilities, first_T
    )
    num_experts = probs_TE.shape[1]
    scale = num_experts / (index_TK.shape[1] if variant == "deepseek" else 1)
    if rank_totals is not None:
        if sequence_lengths is not None:
            raise ValueError(
                "rank_totals and sequence_lengths cannot be combined; pass one of them"
            )
        if rank_totals.shape != (2 * num_experts + 1,):
            got = tuple(rank_totals.shape)
            raise ValueError(f"rank_totals has shape {got}, expected ({2 * num_experts + 1},)")
        load_E, mass_E, tokens = rank_totals.split([num_experts, num_experts, 1])
        # f_e = load_e / tokens and P_e = mass_e / tokens, so their product divides by tokens twice.
        coefficient_E = scale * load_E / tokens.clamp_min(1).square()
        rank_share = (probs_TE.sum(0) * coefficient_E).sum()
        # The other ranks' share has no gradient here; the mean over ranks divides by their number.
        return (mass_E * coefficient_E).sum() + world_size() * (rank_share - rank_share.detach())
    if sequence_lengths is None:
        load_E = _load(chosen_TC, counts_T, num_experts)
        coefficient_E = scale * load_E / counts_T.sum().clamp_min(1).square()
        return (probs_TE.sum(0) * coefficient_E).sum()
    sequence_T = _sequence_of_token(sequence_lengths, probs_TE)
    sequences = sequence_lengths.shape[0]
    slots_TC = sequence_T.unsqueeze(1) * num_experts + chosen_TC
    load_SE = _load(slots_TC, counts_T, sequences * num_experts).view(sequences, num_experts)
    tokens_S = counts_T.new_zeros(sequences).index_add_(0, sequence_T, counts_T)
    occupied = (tokens_S > 0).sum().clamp_min(1)
    coefficient_SE = scale * load_SE / (tokens_S.clamp_min(1).square() * occupied).unsqueeze(1)
    return (probs_TE * coefficient_SE.index_select(0, sequence_T)).sum()


@full_precision
def load_totals(
    probs_TE: Tensor,
    index_TK: Tensor,
    mask_T: Tensor | None = None,
    variant: Variant = "switch",
    *,
    probabilities: Probabilities = "all",
    first_T: Tensor | None = None,
) -> Tensor:
    """This rank's loads (E), probability sums (E) and token count (1), without gradient."""
    check_shapes(probs_TE=probs_TE, index_TK=index_TK, mask_T=mask_T)
    probs_TE, chosen_TC, counts_T = _prepare(
        probs_TE.detach(), index_TK, mask_T, variant, probabilities, first_T
    )
    load_E = _load(chosen_TC, counts_T, probs_TE.shape[1])
    return torch.cat([load_E, probs_TE.sum(0), counts_T.sum(0, keepdim=True)])


def _prepare(
    probs_TE: Tensor,
    index_TK: Tensor,
    mask_T: Tensor | None,
    variant: Variant,
    probabilities: Probabilities,
    first_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities to average, the choices counted as load, and 1 for each token that counts."""
    check_choice("variant", variant, ("switch", "deepseek", "gshard"))
    check_choice("probabilities", probabilities, ("all", "topk"))
    probs_TE = counted(probs_TE, mask_T)
    index_TK = blank(index_TK.long(), mask_T)
    counts_T = blank(probs_TE.new_ones(probs_TE.shape[0]), mask_T)
    chosen_TC = index_TK
    if variant == "gshard":
        first_T = first_choice(probs_TE, index_TK) if first_T is None else first_T
        chosen_TC = blank(first_T.long(), mask_T).unsqueeze(1)
    if probabilities == "topk":
        picked_TK = probs_TE.gather(-1, index_TK)
        scores_TK = picked_TK / picked_TK.sum(-1, keepdim=True).clamp_min(1e-20)
        probs_TE = torch.zeros_like(probs_TE).scatter(-1, index_TK, scores_TK)
    return probs_TE, chosen_TC, counts_T


def first_choice(probs_TE: Tensor, index_TK: Tensor) -> Tensor:
    """The selected expert (T,) of highest probability; the lowest id among equals."""
    by_id_TK = index_TK.long().sort(-1).values
    first_T1 = probs_TE.detach().gather(-1, by_id_TK).argmax(-1, keepdim=True)
    return by_id_TK.gather(-1, first_T1).squeeze(1)


def _load(slots_TC: Tensor, counts_T: Tensor, size: int) -> Tensor:
    """Tokens per slot. Sums of ones are exact in any order, so this is deterministic."""
    ones = counts_T.unsqueeze(1).expand_as(slots_TC).reshape(-1)
    return counts_T.new_zeros(size).index_add_(0, slots_TC.reshape(-1), ones)


def _sequence_of_token(sequence_lengths: Tensor, probs_TE: Tensor) -> Tensor:
    tokens = probs_TE.shape[0]
    if sequence_lengths.dim() != 1 or sequence_lengths.is_floating_point():
        raise ValueError(
            f"sequence_lengths has shape {tuple(sequence_lengths.shape)} and dtype "
            f"{sequence_lengths.dtype}, expected (sequences,) integers"
        )
    # On an accelerator this check would wait for the device, so there it is left to the caller.
    if on_host(sequence_lengths) and int(sequence_lengths.sum()) != tokens:
        raise ValueError(
            f"sequence_lengths sum to {int(sequence_lengths.sum())}, expected T={tokens}"
        )
    ends_S = sequence_lengths.to(probs_TE.device).cumsum(0)
    return torch.searchsorted(ends_S, torch.arange(tokens, device=ends_S.device), right=True)


class LoadBalanceOptions(TermOptions):
    """Options of :func:`load_balancing_loss`."""

    variant: Variant = Field(default="switch", description="whose formula and scale")
    scope: Literal["sequence", "micro_batch", "global_batch"] = Field(
        default="micro_batch",
        description="tokens that are balanced together; `global_batch`: a micro-batch of all ranks",
    )
    probabilities: Probabilities = Field(
        default="all", description="of all experts, or of the selected ones"
    )


class LoadBalance(Term):
    """``load_balance``: product of load share and mean probability, summed over experts."""

    name = "load_balance"
    source = "P0 eq. 18; P4 §2.3; GShard; Switch; DeepSeek-V2; Qiu et al. 2025"
    reads = "router probabilities"
    trains = frozenset({"router"})
    selection = True
    Options = LoadBalanceOptions
    options: LoadBalanceOptions

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        options = self.options
        probs_TE, index_TK = record.distribution_TE, record.index_TK
        inputs = (probs_TE, index_TK, record.mask_T, options.variant)
        lengths = totals = first_T = None
        if options.variant == "gshard":
            first_T = context.kept(
                f"{self.name}, first choice",
                lambda: packed_index(first_choice(probs_TE, index_TK), probs_TE.shape[1]),
            )
        if options.scope == "sequence":
            lengths = record.sequence_lengths
            if lengths is None:
                raise ObjectiveError(
                    "method.terms.load_balance.scope: 'sequence' needs the length of each "
                    "sequence, which this forward pass did not provide; use 'micro_batch'"
                )
        if options.scope == "global_batch":
            # Kept, so that a recomputation needs no communication.
            totals = context.kept(self.name, partial(self._totals_over_ranks, inputs, first_T))
        return load_balancing_loss(
            *inputs,
            lengths,
            probabilities=options.probabilities,
            rank_totals=totals,
            first_T=first_T,
        )

    def _totals_over_ranks(
        self, inputs: tuple[Tensor, Tensor, Tensor, Variant], first_T: Tensor | None
    ) -> Tensor:
        probabilities = self.options.probabilities
        totals = load_totals(*inputs, probabilities=probabilities, first_T=first_T)
        if distributed_run():
            distributed.all_reduce(totals)
        return totals
