"""Infer a router's rule from its outputs, for the proof of a declaration."""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from moe_finetune.losses.record import scores_of
from moe_finetune.models.base import Family, Score


@dataclass(frozen=True)
class WeightRule:
    """How logits become weights of the selected experts; ``difference`` to the actual weights."""

    score: str
    renormalize: bool
    scaling: float
    difference: float

    def __str__(self) -> str:
        summed = "of sum 1" if self.renormalize else "not renormalized"
        return f"{self.score}, {summed}, scaled by {self.scaling:.4g}"


def declared_rule(
    family: Family, config: object, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
) -> WeightRule:
    """The rule that ``family`` declares, with its largest difference relative to the weights."""
    renormalize, scaling = family.renormalize(config), family.scaling(config)
    expected = _weights(family.score, renormalize, logits_TE, index_TK) * scaling
    return WeightRule(family.score, renormalize, scaling, _relative(expected, weights_TK))


def nearest_rule(logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor) -> WeightRule:
    """The rule that gives the weights most exactly."""
    rules = []
    for score in get_args(Score):
        for renormalize in (False, True):
            unscaled = _weights(score, renormalize, logits_TE, index_TK)
            scaling = float((weights_TK / unscaled).median())
            difference = _relative(unscaled * scaling, weights_TK)
            rules.append(WeightRule(score, renormalize, scaling, difference))
    return min(rules, key=lambda rule: rule.difference)


def _weights(score: Score, renormalize: bool, logits_TE: Tensor, index_TK: Tensor) -> Tensor:
    scores = scores_of(logits_TE.float(), score)
    weights = scores.gather(-1, index_TK)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights


def _relative(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual.float()).abs().max() / actual.float().abs().max())


def selected(
    score: Score, logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: tuple[int, int]
) -> Tensor:
    """Index (T, K) of the selection by scores, bias and groups, in ascending order."""
    choice = scores_of(logits_TE.float(), score)
    if bias_E is not None:
        choice = choice + bias_E.float()
    count, top_groups = groups
    if count > 1:
        grouped = choice.view(choice.shape[0], count, -1)
        # Softmax routers take a group by its best expert, others by the two best.
        best = grouped.topk(1 if score == "softmax" else 2, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(top_groups).indices, True
        )
        choice = grouped.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).view_as(choice)
    return choice.topk(top_k, dim=-1).indices.sort(-1).values


def nearest_groups(
    score: Score, logits_TE: Tensor, bias_E: Tensor | None, index_TK: Tensor
) -> tuple[int, int] | None:
    """Numbers of groups and kept groups that reproduce the router's selection, or None."""
    experts, top_k = logits_TE.shape[1], index_TK.shape[1]
    router_index = index_TK.sort(-1).values
    for count in (n for n in range(1, experts // 2 + 1) if experts % n == 0):
        for top_groups in range(1, count) if count > 1 else (1,):
            if top_groups * experts // count < top_k:
                continue
            if torch.equal(
                selected(score, logits_TE, bias_E, top_k, (count, top_groups)), router_index
            ):
                return count, top_groups
    return None
