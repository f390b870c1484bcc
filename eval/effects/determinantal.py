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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_finetune.errors import CaptureError
from moe_finetune.moe.choice.select_again import Rule, correction_bias, select_again
from moe_finetune.moe.layers import MoeLayer, moe_layers


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


@contextmanager
def determinantal_choice(
    model: nn.Module, eps: float = 1e-4, candidates: int | None = None
) -> Iterator[None]:
    """Make every MoE layer of a transformers model select by :func:`greedy_choice`.

    All ``candidates`` with the highest scores (None: all experts) are computed for every token;
    the guarantee holds among them. Weights follow the router's rule.

    Raises:
        CaptureError: the router does not select any k experts by score.
    """
    layers = moe_layers(model)
    config, family = layers[0].experts.config, layers[0].family
    selected, count = family.top_k(config), layers[0].places.num_experts
    if candidates is not None and not selected <= candidates <= count:
        raise CaptureError(f"{candidates} candidates; expected {selected} to {count}")
    choices = [Choice(layer, eps, candidates or count) for layer in layers]
    handles = [handle for choice in choices for handle in choice.hooks()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Choice:
    """The hooks of one layer: keep the router's scores, and select again before the experts."""

    def __init__(self, layer: MoeLayer, eps: float, candidates: int):
        self.layer, self.eps, self.candidates = layer, eps, candidates
        self.rule = Rule(layer, "determinantal choice")
        config = layer.experts.config
        bias_E = correction_bias(layer.block)
        for refused, why in (
            (
                layer.index in layer.family.fixed_layers(config),
                "its experts are looked up by token",
            ),
            (layer.family.top_k(config) < 2, "it selects only one expert per token"),
            (self.rule.groups > 1, "it selects experts from groups"),
            (bias_E is not None and bool(bias_E.any()), "a bias is added to its scores"),
        ):
            if refused:
                raise CaptureError(
                    f"determinantal choice is not supported for this {layer.family.title}, layer "
                    f"{layer.index}: {why}"
                )

    def hooks(self) -> list[RemovableHandle]:
        path = self.layer.family.router_logits
        source = self.layer.router.get_submodule(path) if path else self.layer.router
        return [
            source.register_forward_hook(self.keep_scores),
            self.layer.experts.register_forward_pre_hook(self.select),
        ]

    def keep_scores(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self.layer.family.router_logits:
            outputs = output if isinstance(output, tuple) else (output,)
            output = outputs[self.layer.family.router_returns.index("logits")]
        self.scores_TE = self.rule.scores(output.reshape(-1, output.shape[-1]))

    @torch.no_grad()
    def select(self, experts: nn.Module, args: tuple) -> tuple:
        hidden_TH, index_TK, weights_TK = args
        quality_TN, tried_TN = self.scores_TE.topk(self.candidates, dim=-1)
        size = max(1, WORK // (self.candidates * hidden_TH.shape[-1]))
        chosen = []
        for start in range(0, len(hidden_TH), size):
            rows = slice(start, start + size)
            index_S1 = tried_TN[rows].reshape(-1, 1)
            hidden_SH = hidden_TH[rows].repeat_interleave(self.candidates, 0)
            ones_S1 = weights_TK.new_ones(index_S1.shape)
            outputs_SH = experts.forward(hidden_SH, index_S1, ones_S1)
            features_SNH = outputs_SH.view(-1, self.candidates, outputs_SH.shape[-1])
            chosen.append(
                greedy_choice(quality_TN[rows], features_SNH, index_TK.shape[1], self.eps)
            )
        again_TK = tried_TN.gather(1, torch.cat(chosen))
        weights, index = select_again(self.scores_TE, again_TK, index_TK, weights_TK, self.rule)
        return hidden_TH, index, weights
