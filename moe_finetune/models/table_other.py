"""Families with other kinds of routers; facts from each class in transformers 5.19."""

from dataclasses import replace
from typing import Any

from moe_finetune.models.base import GATED_MLP, QKVO, DiskLayout, Rows, require, under
from moe_finetune.models.standard import (
    STACKS,
    W1_W3_W2,
    key,
    scaled,
    sigmoid,
    softmax,
    ungrouped,
    yes,
)


def _check_deepseek_v4(config: Any) -> None:
    require(config, scoring_func=("sqrtsoftplus",))


def _hash_layers(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "hash_moe"]


FAMILIES = (
    sigmoid(
        "deepseek_v4",
        "DeepSeek-V4",
        score="sqrtsoftplus",
        # Not o_a_proj, which multiplies each group of heads by its own matrix.
        attention_targets=under("self_attn", "q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"),
        disk=replace(
            W1_W3_W2,
            block="model.layers.{layer}.ffn",
            router_bias="gate.bias",
        ),
        renormalize=yes,
        groups=ungrouped,
        fixed_layers=_hash_layers,
        check=_check_deepseek_v4,
        # Keys are compressed in windows counted from the first position, padding included.
        rows=Rows(per_sequence=("DeepseekV4Attention",), padding="read", generates_padded=False),
    ),
    softmax(
        "gemma4_text",
        "Gemma 4 (text)",
        shared_targets=under("mlp", *GATED_MLP),
        disk=DiskLayout(
            block="model.layers.{layer}",
            router="router.proj.weight",
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
        ),
        block_path="",
        router_name="router",
        router_weight="proj.weight",
        router_returns=("probabilities", "weights", "index"),
        router_logits="proj",
        top_k=key("top_k_experts"),
        renormalize=yes,
        own_weights="each expert's weight is scaled by a learned factor",
    ),
    sigmoid(
        "inkling_text",
        "Inkling (text)",
        attention_targets=(*QKVO, "self_attn.r_proj"),
        shared_targets=(),  # stacks, as the routed experts are
        disk=STACKS,
        router_returns=("logits", "weights", "index", "shared weights"),
        renormalize=yes,
        scaling=scaled("route_scale"),
        own_weights="they are normalized together with the shared experts' weights",
        groups=ungrouped,
        bias_export="none",
        rows=Rows(per_sequence=("InklingShortConvolution",)),
    ),
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
        rows=Rows(per_sequence=("JambaMambaMixer",)),
    ),
    softmax(
        "phimoe",
        "Phi-3.5-MoE",
        disk=W1_W3_W2,
        router_name="router",
        num_experts=key("num_local_experts"),
        renormalize=lambda config: False,
        own_weights="SparseMixer selects one expert after another and samples them in training",
        expert_width=key("intermediate_size"),
    ),
)
