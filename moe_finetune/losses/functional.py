"""Every loss as a pure function on tensors."""

from __future__ import annotations

from moe_finetune.losses.load_balance import load_balancing_loss, load_totals
from moe_finetune.losses.orthogonality import orthogonality_from_gram, orthogonality_loss
from moe_finetune.losses.variance import variance_loss
from moe_finetune.losses.z_loss import router_z_loss

__all__ = [
    "load_balancing_loss",
    "load_totals",
    "orthogonality_from_gram",
    "orthogonality_loss",
    "router_z_loss",
    "variance_loss",
]
