"""Placement of experts on ranks: planned from a trace, judged on what the plan has not seen."""

from moe_finetune.placement.partition import plan_placement

__all__ = ["plan_placement"]
