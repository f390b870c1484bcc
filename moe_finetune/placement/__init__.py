"""Placement of experts on ranks: plan it from a trace, simulate it, group sequences by it."""

from moe_finetune.placement.partition import plan_placement

__all__ = ["plan_placement"]
