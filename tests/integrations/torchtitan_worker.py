"""One rank of two: torchtitan's MoE blocks in a tiny Qwen3-MoE, with losses, under FSDP2.

``python -m tests.integrations.torchtitan_worker EXAMPLE``, the example's file. Fails where a loss
or a gradient is not the one of this package's own hooks.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import grouped_mm, silu
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import (
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.qwen3 import model_registry

from moe_finetune.losses import functional
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny
from tests.support.objectives import objective_of

TERMS = {
    "load_balance": {"weight": 0.3},
    "orthogonality": {"weight": 0.5},
    "specialization": {"weight": 0.6},
    "variance": {"weight": 0.7},
    "z_loss": {"weight": 0.02},
    "coupling": {"weight": 0.4},
    "erc": {"weight": 0.1, "noise": False},
}


def losses_of(record, below):
    """``TERMS`` with pure functions."""
    mask_T = record.mask_T
    loss = 0.3 * functional.load_balancing_loss(record.distribution_TE, record.index_TK, mask_T)
    loss = loss + 0.5 * functional.orthogonality_loss(record.outputs_TKH, mask_T=mask_T)
    loss = loss + 0.6 * functional.specialization_loss(record.activations_TKD, mask_T)
    loss = loss + 0.7 * functional.variance_loss(record.scores_TE, mask_T)
    loss = loss + 0.02 * functional.router_z_loss(record.logits_TE, mask_T)
    gate = record.expert_factors("gate").weight_EOI
    loss = loss + 0.1 * functional.erc_loss(record.router_weight_EH, gate, noise=False)
    if below is not None:
        p_TE, index_TK = below.distribution_TE, below.index_TK
        top_k = index_TK.shape[1]
        loss = loss + 0.4 * functional.coupling_loss(
            p_TE, index_TK, record.distribution_TE, top_k, mask_T
        )
    return loss


class Float32Experts(GroupedExperts):
    """torchtitan's experts without its casts to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        gate_RF = self._grouped_mm(A=x_RD, B_t=self.w1_EFD.mT, offs=ends_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=self.w3_EFD.mT, offs=ends_E)
        return self._grouped_mm(A=silu(gate_RF) * up_RF, B_t=self.w2_EDF.mT, offs=ends_E)

    def _grouped_mm(self, *, A, B_t, offs):
        return grouped_mm(A, B_t, offs=offs)


def block_of(mlp: nn.Module, config, experts: type[GroupedExperts]) -> MoE:
    """A torchtitan block with the weights of a Qwen3-MoE block."""
    count, top_k = config.num_experts, config.num_experts_per_tok
    sizes = {"dim": config.hidden_size, "hidden_dim": config.moe_intermediate_size}
    gate = Linear.Config(in_features=config.hidden_size, out_features=count)
    block = MoE.Config(
        num_experts=count,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=count, gate=gate, top_k=top_k, score_func="softmax", route_norm=True
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=experts.Config(num_experts=count, **sizes),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=count, top_k=top_k),
        ),
    ).build()
    inner = block.routed_experts.inner_experts
    with torch.no_grad():
        block.router.gate.weight.copy_(mlp.gate.weight)
        gate_EFD, up_EFD = mlp.experts.gate_up_proj.chunk(2, 1)
        inner.w1_EFD.copy_(gate_EFD)
        inner.w3_EFD.copy_(up_EFD)
        inner.w2_EDF.copy_(mlp.experts.down_proj)
    return block


def as_ours(name: str, grads: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient that a torchtitan model has for our parameter ``name``."""
    name = name.replace("mlp.gate.", "mlp.router.gate.")
    experts = "mlp.routed_experts.inner_experts"
    if name.endswith("gate_up_proj"):
        gate, up = (name.replace("mlp.experts.gate_up_proj", f"{experts}.w{i}_EFD") for i in (1, 3))
        return torch.cat([grads[gate], grads[up]], 1)
    return grads[name.replace("mlp.experts.down_proj", f"{experts}.w2_EDF")]


def main(path: str) -> None:
    example = runpy.run_path(path)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(7 + rank)
    ids = torch.randint(4, tiny.VOCABULARY, (2, 19 + rank))

    def step(model):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    ours = tiny.model("qwen3_moe").train()
    objective, values = objective_of(TERMS, model_facts(ours)), []
    noted = lambda record, loss: values.append(loss.total.detach())  # noqa: E731
    with Recorder(ours, objective, [noted]):
        step(ours)
    for parameter in ours.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= world  # FSDP averages

    for experts, tolerance in ((Float32Experts, 1e-5), (GroupedExperts, 2e-2)):
        model, losses = tiny.model("qwen3_moe").train(), example["BlockLosses"](losses_of)
        for number, layer in enumerate(model.model.layers):
            layer.mlp = block_of(layer.mlp, model.config, experts)
            losses.attach(layer.mlp, number)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        step(model)
        for number, value in enumerate(values):
            torch.testing.assert_close(losses.losses[number], value, rtol=tolerance, atol=1e-6)
        if experts is GroupedExperts:
            continue  # bfloat16 may select other experts in the layers above
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        largest = 0.0
        for name, parameter in ours.named_parameters():
            error = (as_ours(name, grads) - parameter.grad).abs().max()
            relative = float(error / parameter.grad.abs().max())
            largest = max(largest, relative)
            assert relative < tolerance, (name, relative)
        print(f"torchtitan: gradients differ by {largest:.1e}", file=sys.stderr)

    spec = model_registry("debugmodel_moe")
    losses = example["BlockLosses"](losses_of)
    spec.parallelize_fn = lambda model, **options: model  # torchtitan's own needs an accelerator
    with torch.device("meta"):
        model = example["with_losses"](spec, losses).parallelize_fn(spec.model.build())
    blocks = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    assert len(blocks) > 1 and all(block._forward_hooks for block in blocks)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
