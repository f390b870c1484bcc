"""Select experts by a greedy determinant instead of top-k, for evaluation (P4 theorem 6.3).

A token's kernel is ``L_ij = q_i q_j cos(y_i, y_j)``, where an expert's quality q is its router
score and y its output on the token. Each step adds the expert that increases ``f(S) = log det(I +
L_S / eps)`` most, so an expert similar to those already selected gains little. f is 0 for the empty
set, monotone and submodular: the greedy set reaches at least ``1 - 1/e`` of the best value of any k
experts (Nemhauser, Wolsey, Fisher 1978). With a large eps the k experts of highest quality are
selected.

Scores as quality, cosines as similarity, and the place of eps (as in the paper's determinantal
loss, algorithm 2) are our reading.

Shape legend: T tokens, S some of them, E experts, N candidates, K or k selected, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_finetune.errors import CaptureError
from moe_finetune.moe.biased_choice import Rule, correction_bias, select_again
from moe_finetune.moe.layers import MoeLayer, moe_layers, stacks
from moe_finetune.moe.perturbation import Perturbation


def greedy_choice(quality_TN: Tensor, features_TNH: Tensor, k: int, eps: float) -> Tensor:
    """Return candidates ``(T, k)`` in the order of selection; ties go to the first.

    Selects the largest pivots of a Cholesky factor of ``L + eps I`` that grows by one row per step
    (Chen et al. 2018): a candidate's remaining diagonal entry is its factor in the determinant.

    Args:
        quality_TN: q, nonnegative.
        features_TNH: y, of any norm; a zero vector has cosine 0 with anything.
        k: at most N.
        eps: positive.
    """
    features_TNH = features_TNH.to(quality_TN.dtype)
    lengths_TN1 = features_TNH.norm(dim=-1, keepdim=True)
    scaled_TNH = features_TNH / lengths_TN1.masked_fill(lengths_TN1 == 0, 1) * quality_TN[..., None]
    left_TN = quality_TN.square()
    rows_TNk = quality_TN.new_zeros(*quality_TN.shape, k)
    chosen = []
    for step in range(k):
        pivot_T1 = left_TN.argmax(1, keepdim=True)
        chosen.append(pivot_T1)
        pivot_left_T1 = left_TN.gather(1, pivot_T1).clamp_min(0) + eps
        at_T1H = pivot_T1[..., None].expand(-1, 1, scaled_TNH.shape[-1])
        kernel_TN = (scaled_TNH @ scaled_TNH.gather(1, at_T1H).mT).squeeze(-1)
        before_T1k = rows_TNk.gather(1, pivot_T1[..., None].expand(-1, 1, k))
        row_TN = (kernel_TN - (rows_TNk @ before_T1k.mT).squeeze(-1)) / pivot_left_T1.sqrt()
        rows_TNk[..., step] = row_TN
        left_TN = (left_TN - row_TN.square()).scatter(1, pivot_T1, float("-inf"))
    return torch.cat(chosen, 1)


WORK = 2**24
"""Number of output values in memory at a time."""


@dataclass(frozen=True)
class Determinantal:
    """``eps`` of the objective, and the number of top-scoring candidates (None: all experts)."""

    eps: float = 1e-4
    candidates: int | None = None


class DeterminantalChoice(Perturbation):
    """Makes every MoE layer select by :func:`greedy_choice`, with the router's rule for weights.

    All candidates are computed for every token: E/K times the experts' work, or N/K with N
    candidates, among which alone the guarantee holds.

    Raises:
        CaptureError: on ``install``, if the router does not select any k experts by score.
    """

    def __init__(self, options: Determinantal):
        self.options = options
        self._rules: dict[int, Rule] = {}
        self._scores: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        layers = moe_layers(model)
        config, family = layers[0].experts.config, layers[0].family
        count, selected = family.num_experts(config), family.top_k(config)
        candidates = self.options.candidates
        if candidates is not None and not selected <= candidates <= count:
            raise CaptureError(
                f"determinantal choice: {candidates} candidates; expected {selected} to "
                f"{count}, the experts per token and all experts of this {family.title}"
            )
        for layer in layers:
            rule = Rule(layer, "determinantal choice")
            if why := _other_choice(layer, rule, selected):
                raise CaptureError(
                    f"determinantal choice is not supported for this {family.title}, layer "
                    f"{layer.index}: {why}"
                )
            self._rules[layer.index] = rule

    def routing(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep the scores until the experts run."""
        self._scores[layer.index] = self._rules[layer.index].scores(logits_TE)
        return weights_TK, index_TK

    @torch.no_grad()
    def at_experts(
        self,
        layer: MoeLayer,
        outputs_of: Callable[[slice, Tensor], Tensor],
        weights_TK: Tensor,
        index_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Select among the candidates by score and output."""
        scores_TE = self._scores.pop(layer.index)
        quality_TN, candidates_TN = scores_TE.topk(
            self.options.candidates or scores_TE.shape[1], dim=-1
        )
        hidden = stacks(layer.experts)[1].shape[1]
        size = max(1, WORK // (candidates_TN.shape[1] * hidden))
        chosen = []
        for start in range(0, len(scores_TE), size):
            rows = slice(start, start + size)
            outputs_SNH = outputs_of(rows, candidates_TN[rows])
            chosen.append(
                greedy_choice(quality_TN[rows], outputs_SNH, index_TK.shape[1], self.options.eps)
            )
        again_TK = candidates_TN.gather(1, torch.cat(chosen)) if chosen else index_TK
        return select_again(scores_TE, again_TK, index_TK, weights_TK, self._rules[layer.index])


def _other_choice(layer: MoeLayer, rule: Rule, selected: int) -> str | None:
    """Why the router does not select any k experts by score, or None."""
    if layer.index in layer.family.fixed_layers(layer.experts.config):
        return "its experts are looked up by token"
    if selected < 2:
        return "it selects only one expert per token, so no two experts can be similar"
    if rule.groups > 1:
        return f"its experts are selected from {rule.kept_groups} of {rule.groups} groups"
    bias_E = correction_bias(layer.block)
    if bias_E is not None and bool(bias_E.any()):
        return (
            "a bias that may be negative is added to its scores, so they cannot serve as qualities"
        )
    return None
