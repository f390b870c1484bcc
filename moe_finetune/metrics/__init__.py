"""Metrics of routing, experts, coherence and placement: pure functions on numpy or torch arrays."""

from moe_finetune.metrics.coherence import (
    coherence_barrier,
    effective_rank,
    mutual_coherence,
)
from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.experts import (
    activation_cosine,
    expert_overlap,
    gram_cosine,
    output_cosine,
    silhouette,
)
from moe_finetune.metrics.load import expert_load, max_violation
from moe_finetune.metrics.paths import (
    conditional_activation,
    coupling_mass,
    path_stability,
    top_choice,
)
from moe_finetune.metrics.placement import placement_metrics
from moe_finetune.metrics.router import (
    erc_table,
    noise_level,
    router_cosine,
)
from moe_finetune.metrics.routing import (
    routing_entropy,
    routing_information,
    routing_variance,
    score_variance,
)
from moe_finetune.metrics.tokens import conditional_mean_rank

__all__ = [
    "activation_cosine",
    "coherence_barrier",
    "conditional_activation",
    "conditional_mean_rank",
    "coupling_mass",
    "domain_information",
    "effective_rank",
    "erc_table",
    "expert_load",
    "expert_overlap",
    "gram_cosine",
    "max_violation",
    "mutual_coherence",
    "noise_level",
    "output_cosine",
    "path_stability",
    "placement_metrics",
    "router_cosine",
    "routing_entropy",
    "routing_information",
    "routing_variance",
    "score_variance",
    "silhouette",
    "top_choice",
]
