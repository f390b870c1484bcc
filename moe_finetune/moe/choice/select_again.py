"""Select experts again from the router's logits, with a bias that acts only on the selection.

Repeats what each family's router does after its logits; with a bias of 0 the result equals the
router's, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import CaptureError
from moe_finetune.losses.record import scores_of
from moe_finetune.models.family import CORRECTION_BIASES


def select_with_bias(
    logits_TE: Tensor, bias_E: Tensor, own_index_TK: Tensor, own_weights_TK: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Weights and index with ``bias_E`` added to the scores for the selection.

    If a token's biased selection is the same set as the router's, the router's weights and order
    are kept, so a bias of 0 changes nothing.
    """
    scores_TE = rule.scores(logits_TE)
    choice_TE = logits_TE.float() if rule.bias_on_logits else scores_TE
    choice_TE = choice_TE + rule.own_bias(scores_TE) + bias_E
    if rule.groups > 1:
        choice_TE = _best_groups(choice_TE, rule)
    index_TK = choice_TE.topk(own_index_TK.shape[1], dim=-1).indices
    return select_again(scores_TE, index_TK, own_index_TK, own_weights_TK, rule)


def select_again(
    scores_TE: Tensor,
    index_TK: Tensor,
    own_index_TK: Tensor,
    own_weights_TK: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, Tensor]:
    """Weights and index of another selection; the router's own where the sets are equal."""
    weights_TK = weighting.weights(scores_TE, index_TK).to(own_weights_TK.dtype)
    same_T1 = same_experts(index_TK, own_index_TK).unsqueeze(-1)
    return (
        torch.where(same_T1, own_weights_TK, weights_TK),
        torch.where(same_T1, own_index_TK, index_TK),
    )


def same_experts(index_TK: Tensor, other_TK: Tensor) -> Tensor:
    """Bool (T,): whether both select the same set of experts for a token."""
    return (index_TK.sort(-1).values == other_TK.sort(-1).values).all(-1)


class Weighting:
    """How a layer's family computes weights from logits."""

    def __init__(self, layer: Any):
        family, config = layer.family, layer.experts.config
        self.score = family.score
        self.renormalize = family.renormalize(config)
        self.scaling = family.scaling(config)
        self.proportional = family.proportional

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Float32 scores over all experts."""
        return scores_of(logits_TE.float(), self.score)

    def weights(self, scores_TE: Tensor, index_TK: Tensor) -> Tensor:
        """Routing weights (T, K) of the experts in ``index_TK``."""
        weights_TK = scores_TE.gather(1, index_TK)
        if self.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.scaling

    def of_unselected(self, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor) -> Tensor:
        """The weights (T, E) that experts would have if selected; they learn by the score.

        A normalization is a constant: ``c s_j / N`` of DenseMixer. Where shared experts are part of
        N, the selected experts' own weights show ``c / N``.
        """
        scores_TE = self.scores(logits_TE)
        if not self.renormalize:
            return scores_TE * self.scaling
        selected_T1 = scores_TE.detach().gather(1, index_TK).sum(-1, keepdim=True) + 1e-20
        if self.proportional:
            return scores_TE * (weights_TK.detach().float().sum(-1, keepdim=True) / selected_T1)
        return scores_TE / selected_T1 * self.scaling


class Rule(Weighting):
    """How a layer's family also selects experts.

    ``purpose`` names the caller in the error message if experts cannot be selected again.
    """

    def __init__(self, layer: Any, purpose: str = "loss-free bias"):
        super().__init__(layer)
        family, config = layer.family, layer.experts.config
        self.groups, self.kept_groups = family.groups(config)
        self.bias_on_logits = family.bias_on_logits
        self._block = layer.block
        if family.own_weights:
            raise CaptureError(
                f"{purpose} is not supported for {family.title}: {family.own_weights}"
            )
        if self.groups > 1 and family.score == "softmax":
            raise CaptureError(
                f"{purpose} with n_group {self.groups} is not supported for {family.title}"
            )

    def own_bias(self, scores_TE: Tensor) -> Tensor:
        """The checkpoint's own correction bias, in router or block; 0 without one."""
        bias_E = correction_bias(self._block)
        return scores_TE.new_zeros(()) if bias_E is None else bias_E


def correction_bias(block: nn.Module) -> Tensor | None:
    """The selection bias of a MoE block or its router; None without one."""
    for module in block.modules():
        for name in CORRECTION_BIASES:
            if isinstance(bias := getattr(module, name, None), Tensor):
                return bias
    return None


def _best_groups(choice_TE: Tensor, rule: Rule) -> Tensor:
    grouped = choice_TE.view(choice_TE.shape[0], rule.groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(rule.kept_groups, dim=-1).indices
    keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).view_as(choice_TE)
