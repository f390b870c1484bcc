"""Noise that some methods add to routing in training; inference is unchanged.

- ST-MoE: the router's input is multiplied by U(1 - jitter, 1 + jitter), with dropout inside the
  experts.
- GShard: only a token's second-best expert can be dropped. It is kept with probability min(1, 2
  g2), with g renormalized over the two best. A dropped expert's weight is 0, and the kept weights
  are not renormalized again.

Random numbers come from PyTorch's default generator, which gradient checkpointing restores, so a
recomputed layer draws the same ones.
"""

import torch
from torch import Tensor

from moe_finetune.losses.record import log_scores
from moe_finetune.moe.layers import MoeLayer
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.recipe.method import Perturbations


class TrainingNoise(Perturbation):
    """The recipe's ``method.perturbations``."""

    def __init__(self, options: Perturbations):
        self.jitter = options.jitter or 0.0
        self.expert_dropout = options.expert_dropout or 0.0
        self.random_second_choice = options.random_second_choice

    @property
    def active(self) -> bool:
        return bool(self.jitter or self.expert_dropout or self.random_second_choice)

    def router_input(self, layer: MoeLayer, hidden: Tensor) -> Tensor:
        if not self.jitter:
            return hidden
        return hidden * torch.empty_like(hidden).uniform_(1.0 - self.jitter, 1.0 + self.jitter)

    def noise(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> Tensor:
        context = layer.context
        if context is None or not (context.train and self.random_second_choice):
            return weights_TK
        if index_TK.shape[1] < 2:
            return weights_TK
        dropped_TK = drops_second_choice(logits_TE, index_TK, layer.family.score)
        # Rounding can change which is the second; random numbers are drawn in any case.
        draws = context.draws.setdefault(layer.index, {})
        dropped_TK = draws.setdefault("random_second_choice", dropped_TK)
        return weights_TK.masked_fill(dropped_TK, 0.0)


def drops_second_choice(logits_TE: Tensor, index_TK: Tensor, score: str) -> Tensor:
    """Bool (T, K): drops the second-best expert with probability 1 - min(1, 2 g2).

    The order of ``index_TK`` has no meaning: ranks and g come from the logits by the family's
    ``score``.
    """
    chosen_TK = log_scores(logits_TE.float(), score).gather(1, index_TK)
    best_T2 = chosen_TK.topk(2, dim=1)
    second_T = best_T2.indices[:, 1]
    g2_T = torch.softmax(best_T2.values, dim=1)[:, 1]
    dropped_T = torch.rand_like(g2_T) >= (2.0 * g2_T)
    is_second_TK = torch.arange(index_TK.shape[1], device=index_TK.device) == second_T.unsqueeze(1)
    return is_second_TK & dropped_T.unsqueeze(1)
