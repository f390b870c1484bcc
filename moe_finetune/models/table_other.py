"""Families whose router answers otherwise: read off each class in transformers 5.19."""

from __future__ import annotations

from moe_finetune.models.base import QKVO, DiskLayout, under
from moe_finetune.models.standard import W1_W3_W2, key, softmax

FAMILIES = (
    softmax(
        "jamba",
        "Jamba (Mamba hybrid)",
        attention_targets=(*QKVO, *under("mamba", "in_proj", "x_proj", "out_proj")),
        disk=DiskLayout(block="model.layers.{layer}.feed_forward", router="router.weight"),
        block_path="feed_forward",
        router_name="router",
        router_returns=("logits",),
        renormalize=lambda config: False,
        expert_width=key("intermediate_size"),
    ),
    softmax(
        "phimoe",
        "Phi-3.5-MoE",
        disk=W1_W3_W2,
        router_name="router",
        num_experts=key("num_local_experts"),
        own_weights="SparseMixer takes one expert after the other and, in training, samples them",
        expert_width=key("intermediate_size"),
    ),
)
