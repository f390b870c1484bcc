"""The record of one MoE layer in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Projection = Literal["gate", "up", "down"]


def log_scores(logits_TE: Tensor, score: str) -> Tensor:
    """Log-scores up to a constant per token; their softmax gives the normalized scores, without a
    division by a sum that underflows if all of a sigmoid router's scores do."""
    if score == "softmax":
        return logits_TE
    if score == "sigmoid":
        return torch.nn.functional.logsigmoid(logits_TE)
    # log(softplus(x)) is x where e^x is far below 1, and there softplus itself may be 0.
    usual_TE = torch.nn.functional.softplus(logits_TE.clamp(min=-16.0)).log()
    return 0.5 * torch.where(logits_TE < -16.0, logits_TE, usual_TE)


def scores_of(logits_TE: Tensor, score: str) -> Tensor:
    """Scores over all experts before top-k: softmax, sigmoid, or square root of softplus."""
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        return logits_TE.sigmoid()
    return torch.nn.functional.softplus(logits_TE).sqrt()


@dataclass(frozen=True)
class RoutingRecord:
    """The tensors that a MoE layer computed in one forward.

    Tensors that no active loss or metric needs are ``None``. All tensors keep their graph. Gram
    matrices contain the inner products of a token's K vectors. Most losses on outputs and
    activations need nothing else, and they take K/H of the vectors' memory.

    Attributes:
        layer: index of the decoder layer.
        inputs_TH: the block's input.
        logits_TE: float32, before the score function.
        index_TK: the experts that ran, in the order the family's router gave them.
        own_index_TK: what the router selects, with a loss-free bias; None where that is what ran.
            Router replay runs other experts.
        weights_TK: the weights that the block uses, renormalized and scaled as in the family.
        mask_T: bool, True where a token counts.
        token_ids_T: input ids, or None when the model was called with embeddings.
        sequence_lengths: tokens of each sequence, in the order of T; sums to T.
        router_weight_EH: the router's effective weight, adapter included.
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_factors: the effective projections of the experts, by name.
    """

    layer: int
    inputs_TH: Tensor
    logits_TE: Tensor
    index_TK: Tensor
    weights_TK: Tensor
    mask_T: Tensor
    score: str
    router_weight_EH: Tensor
    own_index_TK: Tensor | None = None
    token_ids_T: Tensor | None = None
    sequence_lengths: Tensor | None = None
    activations_TKD: Tensor | None = None
    outputs_TKH: Tensor | None = None
    activations_gram_TKK: Tensor | None = None
    outputs_gram_TKK: Tensor | None = None
    expert_factors: Callable[[Projection], ProjectionFactors] | None = field(
        default=None, repr=False
    )

    @cached_property
    def probs_TE(self) -> Tensor:
        """Float32 scores over all experts before top-k; sigmoid scores are not normalized."""
        return scores_of(self.logits_TE, self.score)

    @cached_property
    def distribution_TE(self) -> Tensor:
        """``probs_TE`` normalized over experts: rows sum to 1 whatever the score."""
        if self.score == "softmax":
            return self.probs_TE
        return log_scores(self.logits_TE, self.score).softmax(-1)

    @cached_property
    def scores_TK(self) -> Tensor:
        """Probabilities of the selected experts, renormalized to sum to 1, unscaled."""
        return log_scores(self.logits_TE, self.score).gather(-1, self.index_TK).softmax(-1)

    @cached_property
    def scores_TE(self) -> Tensor:
        """``scores_TK`` scattered over all experts, zero where an expert was not selected."""
        return torch.zeros_like(self.logits_TE).scatter(-1, self.index_TK, self.scores_TK)


@dataclass(frozen=True)
class ProjectionFactors:
    """One projection of all experts, ``weight + scaling * B @ A``, without building the sum.

    O is the projection's output width and I its input width: (D, H) for gate and up, (H, D) for
    down. ``weight_EOI`` (a view where the checkpoint fuses projections); ``a_ErI`` and ``b_EOr``,
    or None without an adapter.
    """

    weight_EOI: Tensor
    a_ErI: Tensor | None = None
    b_EOr: Tensor | None = None
    scaling: float = 1.0

    def of(self, experts: Sequence[int]) -> Tensor:
        """The merged projections of some experts, float32 ``(len(experts), O, I)``, detached."""
        chosen = list(experts)
        built_EOI = self.weight_EOI[chosen].detach().float()
        if self.a_ErI is not None and self.b_EOr is not None:
            change_EOI = self.b_EOr[chosen].detach().float() @ self.a_ErI[chosen].detach().float()
            built_EOI = built_EOI + self.scaling * change_EOI
        return built_EOI
