"""Metrics of routing, experts, coherence and placement: pure functions on numpy or torch arrays."""

from moe_finetune.metrics.coherence import coherence_barrier, effective_rank, mutual_coherence
from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.experts import expert_overlap
from moe_finetune.metrics.paths import conditional_activation, path_stability, top_choice
from moe_finetune.metrics.placement import placement_metrics
from moe_finetune.metrics.routing import (
    max_violation,
    routing_entropy,
    routing_variance,
    score_variance,
)
from moe_finetune.metrics.tokens import conditional_mean_rank

__all__ = [
    "coherence_barrier",
    "conditional_activation",
    "conditional_mean_rank",
    "domain_information",
    "effective_rank",
    "expert_overlap",
    "max_violation",
    "mutual_coherence",
    "path_stability",
    "placement_metrics",
    "routing_entropy",
    "routing_variance",
    "score_variance",
    "top_choice",
]
