"""Many small mixtures of experts in one stack, each trained independently (P4 Fig. 3).

All models of a stack have the same sizes and see batches of the same length, so that one batched
product computes them all. The loss is the sum of the models' losses, and AdamW works element by
element, so every model trains as it would alone.

Shape legend: M models, T samples of a batch, F features, E experts, K selected, D hidden,
C classes.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from eval.effects.determinantal import greedy_choice
from moe_finetune.losses.dpp import dpp_loss
from moe_finetune.losses.load_balance import load_balancing_loss
from moe_finetune.losses.ncl import ncl_loss
from moe_finetune.losses.orthogonality import orthogonality_loss

Arm = Literal["baseline", "orthogonality", "dpp", "ncl"]


class Routed(NamedTuple):
    """The results of a forward: ``logits_MTC``, the router's values, and every expert's output."""

    logits_MTC: Tensor
    probs_MTE: Tensor
    index_MTK: Tensor
    outputs_MTEC: Tensor


class StackedMixtures(nn.Module):
    """M mixtures of E two-layer GELU experts with a linear softmax router and top-K selection.

    Router and experts have no biases (appendix L). Weights of the selected experts are
    renormalized to sum 1. Every expert is computed on every sample: at this size that is faster
    than sorting samples by expert. An expert that no sample of a batch selects has a zero gradient.

    Initial weights are uniform in ``±1/sqrt(inputs)``, as in nn.Linear.
    """

    def __init__(
        self, models: int, features: int, classes: int, experts: int = 16, hidden: int = 32,
        top_k: int = 2, generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        self.top_k = top_k

        def uniform(*shape: int, inputs: int) -> nn.Parameter:
            bound = 1 / math.sqrt(inputs)
            return nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) * bound)

        self.router_MFE = uniform(models, features, experts, inputs=features)
        self.up_MFED = uniform(models, features, experts, hidden, inputs=features)
        self.down_MEDC = uniform(models, experts, hidden, classes, inputs=hidden)

    def forward(self, inputs_MTF: Tensor, determinantal_eps: float | None = None) -> Routed:
        """Class logits of every sample, with the values that the losses need.

        With ``determinantal_eps`` the experts are chosen by greedy determinant (theorem 6.3), not
        by top-k.
        """
        experts, hidden = self.up_MFED.shape[2:]
        probs_MTE = (inputs_MTF @ self.router_MFE).softmax(-1)
        hidden_MTED = gelu(inputs_MTF @ self.up_MFED.flatten(2)).unflatten(2, (experts, hidden))
        outputs_MTEC = torch.einsum("mted,medc->mtec", hidden_MTED, self.down_MEDC)
        index_MTK = probs_MTE.topk(self.top_k, dim=-1).indices
        if determinantal_eps is not None:
            flat = probs_MTE.flatten(0, 1), outputs_MTEC.flatten(0, 1)
            index_MTK = greedy_choice(*flat, self.top_k, determinantal_eps).view_as(index_MTK)
        scores_MTK = probs_MTE.gather(-1, index_MTK)
        weights_MTK = scores_MTK / scores_MTK.sum(-1, keepdim=True)
        logits_MTC = (weights_MTK.unsqueeze(-1) * picked(outputs_MTEC, index_MTK)).sum(2)
        return Routed(logits_MTC, probs_MTE, index_MTK, outputs_MTEC)


def picked(outputs_MTEC: Tensor, index_MTK: Tensor) -> Tensor:
    """Outputs of the selected experts, ``(M, T, K, C)``."""
    index = index_MTK.unsqueeze(-1).expand(-1, -1, -1, outputs_MTEC.shape[-1])
    return outputs_MTEC.gather(2, index)


def training_loss(
    routed: Routed, labels_MT: Tensor, arm: Arm, alpha: float, weight: float
) -> Tensor:
    """Sum over models of ``cross-entropy + alpha * balance + weight * diversity``.

    Each model's terms are means over its samples. ``orthogonality`` is the squared cosine of the
    selected outputs over ordered pairs, ``dpp`` is minus the log determinant of their normalized
    Gram matrix, ``ncl`` acts on the softmax of each selected expert's output; algorithm 3's term
    with the label is left out, because the mixture's cross-entropy replaces it. Source: P4 section
    6.2, algorithms 1 to 3.
    """
    models, samples, classes = routed.logits_MTC.shape
    main = cross_entropy(routed.logits_MTC.reshape(-1, classes), labels_MT.reshape(-1))
    # One "sequence" per model: the mean over sequences is the mean over models.
    balance = load_balancing_loss(
        routed.probs_MTE.flatten(0, 1),
        routed.index_MTK.flatten(0, 1),
        sequence_lengths=torch.full((models,), samples),
    )
    total = main + alpha * balance
    if arm != "baseline":
        outputs_TKC = picked(routed.outputs_MTEC, routed.index_MTK).flatten(0, 1)
        total = total + weight * _diversity(outputs_TKC, arm)
    return models * total


def _diversity(outputs_TKC: Tensor, arm: Arm) -> Tensor:
    if arm == "orthogonality":
        return orthogonality_loss(outputs_TKC, form="cosine")
    if arm == "dpp":
        return dpp_loss(outputs_TKC)
    return ncl_loss(outputs_TKC.softmax(-1), normalize=False)
