"""Mixtral: softmax router, renormalised; on disk ``block_sparse_moe.experts.N.w1/w3/w2``."""

from moe_finetune.models.base import QKVO, DiskLayout, Family

FAMILY = Family(
    name="mixtral",
    model_type="mixtral",
    title="Mixtral-8x7B",
    score="softmax",
    attention_targets=QKVO,
    disk=DiskLayout(
        block="model.layers.{layer}.block_sparse_moe",
        gate="experts.{expert}.w1.weight",
        up="experts.{expert}.w3.weight",
        down="experts.{expert}.w2.weight",
    ),
    num_experts=lambda config: config.num_local_experts,
    renormalize=lambda config: True,
    expert_width=lambda config: config.intermediate_size,
)
