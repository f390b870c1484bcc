"""Losses on the router in NeMo Automodel 0.7.0: a forward hook on the gate.

Automodel's trainer scales its ``MoEAuxLossAutoScaler`` for micro-batches and ranks. Set
``aux_loss_coeff`` to 0, so that no second balance loss is added.
"""

import torch
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler
from torch.nn.functional import linear

from moe_finetune.losses import RoutingRecord


def add_losses(gate: Gate, layer: int, loss_of):
    """Hook one gate, whose losses are ``loss_of(record)``; returns the hook's handle."""

    def add(gate, args, output):
        weights_TK, index_TK, balance = output
        if not (gate.training and torch.is_grad_enabled()):
            return output
        x_TH, valid_T = args[0], args[1]
        record = RoutingRecord(
            layer=layer,
            inputs_TH=x_TH,
            logits_TE=linear(x_TH, gate.weight, gate.bias).float(),
            index_TK=index_TK,
            weights_TK=weights_TK,
            mask_T=valid_T,
            score=gate.score_func,
            router_weight_EH=gate.weight,
        )
        loss = loss_of(record)
        return MoEAuxLossAutoScaler.apply(weights_TK, loss), index_TK, balance

    return gate.register_forward_hook(add)
