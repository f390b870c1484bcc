"""Pure functions in a block of one's own equal our hooks, without importing transformers."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from moe_finetune.losses import RoutingRecord, functional, inject
from moe_finetune.moe.layers import model_facts, moe_layers, stacks
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny
from tests.support.objectives import objective_of

TERMS = {
    "load_balance": {"weight": 0.3},
    "orthogonality": {"weight": 0.5},
    "specialization": {"weight": 0.6},
    "dpp": {"weight": 0.2},
    "z_loss": {"weight": 0.02},
    "variance": {"weight": 0.7},
    "coupling": {"weight": 0.4},
}


def block(layer, x_TH, mask_T):
    """Qwen3-MoE's block once more, written with one product for each expert."""
    up_E2DH, down_EHD = stacks(layer.experts)
    router_EH = layer.router.weight
    logits_TE = x_TH @ router_EH.T
    weights_TK, index_TK = logits_TE.softmax(-1).topk(3)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    gate_TKD, raised_TKD = torch.einsum("tkdh,th->tkd", up_E2DH[index_TK], x_TH).chunk(2, -1)
    z_TKD = silu(gate_TKD) * raised_TKD
    y_TKH = torch.einsum("tkhd,tkd->tkh", down_EHD[index_TK], z_TKD)
    record = RoutingRecord(
        layer=layer.index,
        inputs_TH=x_TH,
        logits_TE=logits_TE,
        index_TK=index_TK,
        weights_TK=weights_TK,
        mask_T=mask_T,
        score="softmax",
        router_weight_EH=router_EH,
        activations_TKD=z_TKD,
        outputs_TKH=y_TKH,
    )
    return (weights_TK.unsqueeze(-1) * y_TKH).sum(1), record


def losses_of(record, below):
    """``TERMS`` with pure functions."""
    mask_T = record.mask_T
    loss = 0.3 * functional.load_balancing_loss(record.distribution_TE, record.index_TK, mask_T)
    loss = loss + 0.5 * functional.orthogonality_loss(record.outputs_TKH, mask_T=mask_T)
    loss = loss + 0.6 * functional.specialization_loss(record.activations_TKD, mask_T)
    loss = loss + 0.2 * functional.dpp_loss(record.outputs_TKH, mask_T)
    loss = loss + 0.02 * functional.router_z_loss(record.logits_TE, mask_T)
    loss = loss + 0.7 * functional.variance_loss(record.scores_TE, mask_T)
    if below is not None:
        p_TE, index_TK = below.distribution_TE, below.index_TK
        top_k = index_TK.shape[1]
        loss = loss + 0.4 * functional.coupling_loss(
            p_TE, index_TK, record.distribution_TE, top_k, mask_T
        )
    return loss


def test_values_and_gradients_are_those_of_our_own_hooks():
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    batch, totals, records = tiny.batch(), [], []
    objective = objective_of(TERMS, model_facts(model))

    def observer(record, loss):
        records.append(record)
        totals.append(loss.total)

    with Recorder(model, objective, [observer], needs=objective.needs):
        (model(**batch).logits.sum() * 0).backward()
    assert any(not record.mask_T.all() for record in records)
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    by_hand, last = [], []
    layers = {id(layer.block): layer for layer in moe_layers(model)}

    def forward(module, hidden_BSH):
        layer = layers[id(module)]
        x_TH = hidden_BSH.flatten(0, 1)
        output_TH, record = block(layer, x_TH, records[0].mask_T)
        loss = losses_of(record, last[-1] if last else None)
        last.append(record)
        by_hand.append(loss)
        return inject(output_TH, loss, 1.0).view_as(hidden_BSH)

    for layer in layers.values():
        layer.block.forward = forward.__get__(layer.block)
    (model(**batch).logits.sum() * 0).backward()
    for loss, wanted in zip(by_hand, totals, strict=True):
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        if name in ours:
            error = (parameter.grad - ours[name]).abs().max()
            assert error <= 1e-4 * ours[name].abs().max().clamp_min(1e-5), (name, float(error))
    assert ours["model.layers.0.mlp.gate.weight"].abs().max() > 0


@pytest.mark.more
def test_neither_transformers_nor_peft_is_imported():
    code = (
        "import sys; from moe_finetune.losses import functional, inject, RoutingRecord;"
        "sys.exit(any(m in sys.modules for m in ('transformers', 'peft', 'trl', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
