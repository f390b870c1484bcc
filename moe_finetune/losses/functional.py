"""Every loss as a pure function on tensors; ``*_from_gram`` take inner products, not vectors.

A loss is a scalar in float32 (float64 for float64 tensors), averaged over the tokens that count if
its formula sums over tokens. Gradients have the dtype of their tensor.
"""

from moe_finetune.losses.coupling import coupling_loss
from moe_finetune.losses.dpp import dpp_from_gram, dpp_loss
from moe_finetune.losses.erc import erc_from_table, erc_loss, erc_table
from moe_finetune.losses.load_balance import load_balancing_loss, load_totals
from moe_finetune.losses.ncl import ncl_from_gram, ncl_loss
from moe_finetune.losses.orthogonality import orthogonality_from_gram, orthogonality_loss
from moe_finetune.losses.released import softmax_variance_loss, span_orthogonality_loss
from moe_finetune.losses.router_orthogonality import router_orthogonality_loss
from moe_finetune.losses.specialization import specialization_from_gram, specialization_loss
from moe_finetune.losses.supervised_routing import supervised_routing_loss
from moe_finetune.losses.variance import variance_loss
from moe_finetune.losses.z_loss import router_z_loss

__all__ = [
    "coupling_loss",
    "dpp_from_gram",
    "dpp_loss",
    "erc_from_table",
    "erc_loss",
    "erc_table",
    "load_balancing_loss",
    "load_totals",
    "ncl_from_gram",
    "ncl_loss",
    "orthogonality_from_gram",
    "orthogonality_loss",
    "router_orthogonality_loss",
    "router_z_loss",
    "softmax_variance_loss",
    "span_orthogonality_loss",
    "specialization_from_gram",
    "specialization_loss",
    "supervised_routing_loss",
    "variance_loss",
]
