"""Placement of experts on ranks: planned from a trace, evaluated on unseen sequences."""

from moe_finetune.placement.partition import plan_placement

__all__ = ["plan_placement"]
