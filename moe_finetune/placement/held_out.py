"""Plan on the first half of each domain's sequences, evaluate on the other half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.metrics import placement_metrics
from moe_finetune.placement.baselines import baseline_placements
from moe_finetune.placement.bucketing import Buckets, bucket_sequences
from moe_finetune.placement.partition import plan_placement
from moe_finetune.placement.plan import PlacementPlan

if TYPE_CHECKING:
    from moe_finetune.routing.trace import RoutingTrace


@dataclass(frozen=True)
class HeldOut:
    """A plan, and its metrics and those of simpler placements on unseen tokens.

    Attributes:
        plan: the plan from the first half.
        metrics: ``index order``, ``round robin`` and ``planned`` -> :func:`placement_metrics`.
        buckets: what assigning each sequence to the rank of its first layer's experts would add.
    """

    plan: PlacementPlan
    metrics: dict[str, dict[str, float]]
    buckets: Buckets


def plan_trace(
    trace: RoutingTrace, num_ranks: int, max_imbalance: float = 1.3, num_groups: int = 1
) -> HeldOut:
    """Plan and evaluate the placement of a trace's model on ``num_ranks`` ranks.

    ``num_groups``: the model's routing groups (``n_group``), which stay whole.

    Raises:
        TraceError: the trace has only one sequence, or fewer tokens than experts.
        RecipeError: ranks or groups do not divide the experts.
    """
    info, ids_TLK, sequence_T = trace.info, trace.load("ids"), trace.load("seq")
    seen_T = _first_half(sequence_T, trace.load("domain"))
    if seen_T.all():
        raise TraceError(
            f"{trace.path}: contains only one sequence, but the plan is evaluated on other "
            "sequences; record more"
        )
    ranks_LE = plan_placement(
        ids_TLK[seen_T], info.num_experts, num_ranks, max_imbalance, num_groups=num_groups
    )
    simple = baseline_placements(len(info.layers), info.num_experts, num_ranks)
    placements = {
        "index order": simple["index_order"],
        "round robin": simple["round_robin"],
        "planned": ranks_LE,
    }
    return HeldOut(
        PlacementPlan.of(info.model_type, info.layers, num_ranks, ranks_LE),
        {name: placement_metrics(ids_TLK[~seen_T], placed) for name, placed in placements.items()},
        bucket_sequences(ids_TLK[~seen_T], sequence_T[~seen_T], ranks_LE),
    )


def _first_half(sequence_T: np.ndarray, domain_T: np.ndarray) -> np.ndarray:
    """Tokens of the first half of each domain, so that both halves have the same mixture."""
    seen_T = np.zeros(len(sequence_T), bool)
    for domain in np.unique(domain_T):
        here_T = domain_T == domain
        seen_T |= here_T & (sequence_T <= np.median(sequence_T[here_T]))
    return seen_T
