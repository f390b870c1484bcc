"""From dense to MoE (SvMoE, P3): cluster, train experts, merge, train the routers, fine-tune."""

from moe_finetune.upcycle.merge_into_moe import UpcycleReport, merge_experts

__all__ = ["UpcycleReport", "merge_experts"]
