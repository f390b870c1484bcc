"""Families with DeepSeek-V3's sigmoid router; facts from each class in transformers 5.19."""

from __future__ import annotations

from dataclasses import replace

from moe_finetune.models.base import MLA, QKVO, UNREAD_POSITIONS, DiskLayout, Rows, under
from moe_finetune.models.standard import (
    STACKS,
    W1_W3_W2,
    key,
    scaled,
    sigmoid,
    ungrouped,
    unscaled,
    yes,
)

FAMILIES = (
    sigmoid(
        "afmoe",
        "AFMoE (Trinity)",
        attention_targets=(*QKVO, "self_attn.gate_proj"),
        disk=DiskLayout(router="router.gate.weight", router_bias="expert_bias"),
        router_name="router",
        router_weight="gate.weight",
        num_experts=key("num_experts"),
        renormalize=yes,
        scaling=scaled("route_scale"),
        groups=ungrouped,
        rows=UNREAD_POSITIONS,
    ),
    sigmoid("axk1", "A.X K1", attention_targets=MLA),
    sigmoid("axk2", "A.X K2", attention_targets=(*MLA, "self_attn.q_gate_proj")),
    sigmoid("deepseek_v32", "DeepSeek-V3.2", attention_targets=MLA),
    sigmoid("dots1", "dots.llm1"),
    sigmoid(
        "exaone_moe",
        "EXAONE MoE",
        disk=DiskLayout(router_bias="e_score_correction_bias"),
        num_experts=key("num_experts"),
    ),
    sigmoid("glm4_moe", "GLM-4.5"),
    sigmoid("glm4_moe_lite", "GLM-4.7-Flash", attention_targets=MLA),
    sigmoid("glm_moe_dsa", "GLM-5", attention_targets=MLA),
    sigmoid(
        "hy_v3",
        "Hunyuan 3",
        disk=DiskLayout(router="router.gate.weight", router_bias="expert_bias"),
        num_experts=key("num_experts"),
        renormalize=yes,
        scaling=scaled("router_scaling_factor"),
        groups=ungrouped,
    ),
    sigmoid(
        "hy_v4",
        "Hunyuan 4",
        attention_targets=(*MLA, "self_attn.gate_proj"),
        disk=STACKS,
    ),
    sigmoid(
        "kimi_linear",
        "Kimi-Linear-48B-A3B",
        attention_targets=(
            *MLA,
            *under("self_attn", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj"),
        ),
        disk=replace(W1_W3_W2, router_bias="gate.e_score_correction_bias"),
        num_experts=key("num_local_experts"),
        rows=Rows(per_sequence=("KimiLinearDeltaAttention",)),
    ),
    sigmoid(
        "laguna",
        "Laguna",
        attention_targets=(*QKVO, "self_attn.g_proj"),
        disk=DiskLayout(router_bias="experts.e_score_correction_bias"),
        num_experts=key("num_experts"),
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
    ),
    sigmoid(
        "lfm2_moe",
        "LFM2 MoE",
        attention_targets=(
            *under("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
            *under("conv", "in_proj", "out_proj"),
        ),
        shared_targets=(),
        disk=replace(
            W1_W3_W2, block="model.layers.{layer}.feed_forward", router_bias="expert_bias"
        ),
        block_path="feed_forward",
        num_experts=key("num_experts"),
        groups=ungrouped,
        rows=Rows(per_sequence=("Lfm2MoeShortConv",)),
    ),
    sigmoid("mimo_v2_flash", "MiMo-V2-Flash", shared_targets=()),
    sigmoid(
        "minimax_m2",
        "MiniMax-M2",
        shared_targets=(),
        disk=replace(W1_W3_W2, router_bias="e_score_correction_bias"),
        num_experts=key("num_local_experts"),
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
        expert_width=key("intermediate_size"),
    ),
    sigmoid(
        "minimax_m3_vl_text",
        "MiniMax-M3 (text)",
        shared_targets=under("mlp.shared_experts", "gate_up_proj", "down_proj"),
        disk=STACKS,
        num_experts=key("num_local_experts"),
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
        expert_width=key("intermediate_size"),
    ),
    sigmoid(
        "nemotron_h",
        "Nemotron 3 (Mamba hybrid)",
        attention_targets=under("mixer", "q_proj", "k_proj", "v_proj", "o_proj", "in_proj"),
        shared_targets=under("mixer.shared_experts", "up_proj", "down_proj"),
        disk=DiskLayout(
            block="backbone.layers.{layer}.mixer",
            router_bias="gate.e_score_correction_bias",
            gate=None,
        ),
        block_path="mixer",
        gated=False,
        separate_spaces=lambda config: config.moe_latent_size is not None,
        rows=Rows(per_sequence=("NemotronHMamba2Mixer",)),
    ),
    sigmoid("solar_open", "Solar Open"),
)
