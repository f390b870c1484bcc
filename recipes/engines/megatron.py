"""Losses on the router in Megatron-Core 0.16.1: a sketch that was compiled, not run.

Megatron's own ``MoEAuxLossAutoScaler`` takes the loss, so that pipeline schedules and loss
scaling treat it like Megatron's balance loss. Pass the class as
``MoESubmodules(router=RouterWithLosses)`` in the layer's spec, and set
``moe_router_load_balancing_type: none``. Losses on expert outputs need the rows between
``routed_experts_compute`` and ``token_combine``, before other ranks' rows are summed.
"""

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from moe_finetune.losses import RoutingRecord
from moe_finetune.losses.functional import variance_loss


class RouterWithLosses(TopKRouter):
    """Adds the variance loss to the weights that the router returns."""

    def gating(self, input):
        self.logits = super().gating(input)
        return self.logits

    def forward(self, input, padding_mask=None):
        weights_TE, selected_TE = super().forward(input, padding_mask)
        if not (self.training and torch.is_grad_enabled()):
            return weights_TE, selected_TE
        weights_TK, index_TK = weights_TE.topk(self.topk)
        valid_T = selected_TE.any(-1) if padding_mask is None else padding_mask.flatten()
        record = RoutingRecord(
            layer=self.layer_number,
            inputs_TH=input.flatten(0, 1),
            logits_TE=self.logits.flatten(0, -2).float(),
            index_TK=index_TK,
            weights_TK=weights_TK,
            mask_T=valid_T.bool(),
            score=self.score_function,
            router_weight_EH=self.weight,
        )
        loss = 0.1 * variance_loss(record.scores_TE, record.mask_T)
        return MoEAuxLossAutoScaler.apply(weights_TE, loss), selected_TE
