"""Families that follow transformers' common experts interface: a few facts each.

Read off each class in transformers 5.19. Where the experts are fused, which layers have them and
what the files call them is asked from transformers (:mod:`moe_finetune.models.structure`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.base import (
    GATED_MLP,
    MLA,
    QKVO,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    DiskLayout,
    Family,
    expert_groups,
    require,
    under,
)
from moe_finetune.models.structure import layers_with_experts

INDEXER = under("self_attn", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
"""Sparse attention's own selection of keys; frozen unless it is named here."""

LINEAR_ATTENTION = under(
    "linear_attn",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
)


def _key(name: str) -> Callable[[Any], int]:
    return lambda config: int(getattr(config, name))


def _scaled(name: str = "routed_scaling_factor") -> Callable[[Any], float]:
    return lambda config: float(getattr(config, name))


def _unscaled(config: Any) -> float:
    return 1.0


def _ungrouped(config: Any) -> tuple[int, int]:
    return 1, 1


def _yes(config: Any) -> bool:
    return True


W1_W3_W2 = DiskLayout(
    block="model.layers.{layer}.block_sparse_moe",
    gate="experts.{expert}.w1.weight",
    up="experts.{expert}.w3.weight",
    down="experts.{expert}.w2.weight",
)
"""Mixtral's names."""

_STACKS = DiskLayout(
    router_bias="gate.e_score_correction_bias",
    gate_up="experts.gate_up_proj",
    down="experts.down_proj",
)
"""The loaded model's own names."""

_GRANITE_SHARED = under("shared_mlp", "input_linear", "output_linear")
_granite = partial(
    Family,
    score="softmax",
    attention_targets=QKVO,
    disk=DiskLayout(
        block="model.layers.{layer}.block_sparse_moe",
        router="router.layer.weight",
        gate_up="input_linear.weight",
        down="output_linear.weight",
    ),
    block_path="block_sparse_moe",
    router_name="router",
    router_returns=("index", "weights", "logits"),
    num_experts=_key("num_local_experts"),
    renormalize=_yes,
    expert_width=_key("intermediate_size"),
    moe_layers=layers_with_experts,
)
"""IBM's Granite: experts fused in the files, the router's index first."""

# DeepSeek-V3's router: sigmoid, a correction bias on the selection, groups, scaled weights.
_sigmoid = partial(
    Family,
    score="sigmoid",
    attention_targets=QKVO,
    shared_targets=SHARED_EXPERTS,
    disk=DiskLayout(router_bias="gate.e_score_correction_bias"),
    num_experts=_key("n_routed_experts"),
    scaling=_scaled(),
    groups=expert_groups,
    moe_layers=layers_with_experts,
    bias_export="tensor",
)
# Qwen's router: softmax, selected scores renormalised where the config says so.
_softmax = partial(Family, score="softmax", attention_targets=QKVO, moe_layers=layers_with_experts)


def _check_cohere(config: Any) -> None:
    require(config, expert_selection_fn=("softmax",))


def _check_gpt_oss(config: Any) -> None:
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{config.model_type}: the checkpoint is quantised; save it in bfloat16 first "
            "(transformers: Mxfp4Config(dequantize=True)), or take one that is"
        )


def _check_hunyuan(config: Any) -> None:
    for key in ("num_experts", "moe_topk"):
        if not isinstance(getattr(config, key), int):
            raise UnsupportedModelError(
                f"hunyuan_v1_moe: {key} differs by layer; only one number for all is supported"
            )


FAMILIES = (
    _sigmoid(
        "afmoe",
        "afmoe",
        "AfmoeForCausalLM",
        "AFMoE (Trinity)",
        # Not its gate_proj: PEFT takes that name for a half of the experts' gate_up_proj.
        disk=DiskLayout(router="router.gate.weight", router_bias="expert_bias"),
        router_name="router",
        router_weight="gate.weight",
        num_experts=_key("num_experts"),
        renormalize=_yes,
        scaling=_scaled("route_scale"),
        groups=_ungrouped,
    ),
    _softmax(
        "aria_text",
        "aria_text",
        "AriaTextForCausalLM",
        "Aria (text)",
        shared_targets=SHARED_EXPERTS,
        disk=DiskLayout(
            router="router.weight",
            gate_up="experts.fc1.weight",
            down="experts.fc2.weight",
            transposed=True,
        ),
        router_name="router",
        router_returns=("index", "weights", "logits"),
        num_experts=_key("moe_num_experts"),
        top_k=_key("moe_topk"),
        renormalize=_yes,
        expert_width=_key("intermediate_size"),
    ),
    _sigmoid("axk1", "axk1", "AXK1ForCausalLM", "A.X K1", attention_targets=MLA),
    _sigmoid(
        "axk2",
        "axk2",
        "AXK2ForCausalLM",
        "A.X K2",
        attention_targets=(*MLA, "self_attn.q_gate_proj"),
    ),
    _softmax(
        "cohere2_moe",
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        "Cohere 2 MoE",
        renormalize=_yes,
        expert_width=_key("intermediate_size"),
        check=_check_cohere,
    ),
    _sigmoid(
        "deepseek_v32",
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        "DeepSeek-V3.2",
        attention_targets=MLA,
    ),
    _sigmoid("dots1", "dots1", "Dots1ForCausalLM", "dots.llm1"),
    _softmax(
        "ernie4_5_moe",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "ERNIE 4.5",
        shared_targets=SHARED_EXPERTS,
        disk=DiskLayout(router_bias="moe_statics.e_score_correction_bias"),
        num_experts=_key("moe_num_experts"),
        top_k=_key("moe_k"),
        renormalize=_yes,
    ),
    _sigmoid(
        "exaone_moe",
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        "EXAONE MoE",
        disk=DiskLayout(router_bias="e_score_correction_bias"),
        num_experts=_key("num_experts"),
    ),
    _softmax(
        "flex_olmo",
        "flex_olmo",
        "FlexOlmoForCausalLM",
        "FlexOlmo",
        expert_width=_key("intermediate_size"),
    ),
    _sigmoid("glm4_moe", "glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5"),
    _sigmoid(
        "glm4_moe_lite",
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        "GLM-4.7-Flash",
        attention_targets=MLA,
    ),
    _sigmoid("glm_moe_dsa", "glm_moe_dsa", "GlmMoeDsaForCausalLM", "GLM-5", attention_targets=MLA),
    _softmax(
        "hunyuan_v1_moe",
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        "Hunyuan-A13B",
        shared_targets=under("mlp.shared_mlp", *GATED_MLP),
        disk=DiskLayout(router="gate.wg.weight"),
        router_weight="wg.weight",
        top_k=_key("moe_topk"),
        renormalize=_yes,
        expert_width=_key("intermediate_size"),
        check=_check_hunyuan,
    ),
    _softmax(
        "gpt_oss",
        "gpt_oss",
        "GptOssForCausalLM",
        "gpt-oss",
        check=_check_gpt_oss,
        disk=DiskLayout(
            router="router.weight",
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
            transposed=True,
            per_expert=("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"),
        ),
        router_name="router",
        num_experts=_key("num_local_experts"),
        renormalize=_yes,
        expert_width=_key("intermediate_size"),
    ),
    _granite("granitemoe", "granitemoe", "GraniteMoeForCausalLM", "Granite 3 MoE"),
    _granite(
        "granitemoe_swa",
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        "Granite MoE SWA",
        shared_targets=_GRANITE_SHARED,
        disk=DiskLayout(
            block="model.layers.{layer}.block_sparse_moe",
            router="router.weight",
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
        ),
        router_returns=("logits", "weights", "index"),
    ),
    _granite(
        "granitemoeshared",
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        "Granite MoE shared",
        shared_targets=_GRANITE_SHARED,
    ),
    _sigmoid(
        "hy_v3",
        "hy_v3",
        "HYV3ForCausalLM",
        "Hunyuan 3",
        disk=DiskLayout(router="router.gate.weight", router_bias="expert_bias"),
        num_experts=_key("num_experts"),
        renormalize=_yes,
        scaling=_scaled("router_scaling_factor"),
        groups=_ungrouped,
    ),
    _sigmoid(
        "kimi_linear",
        "kimi_linear",
        "KimiLinearForCausalLM",
        "Kimi-Linear-48B-A3B",
        attention_targets=(
            *MLA,
            *under("self_attn", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj"),
        ),
        disk=replace(W1_W3_W2, router_bias="gate.e_score_correction_bias"),
        num_experts=_key("num_local_experts"),
    ),
    _sigmoid(
        "laguna",
        "laguna",
        "LagunaForCausalLM",
        "Laguna",
        attention_targets=(*QKVO, "self_attn.g_proj"),
        disk=DiskLayout(router_bias="experts.e_score_correction_bias"),
        num_experts=_key("num_experts"),
        renormalize=_yes,
        scaling=_unscaled,
        groups=_ungrouped,
    ),
    _softmax(
        "mellum",
        "mellum",
        "MellumForCausalLM",
        "Mellum",
        num_experts=_key("num_local_experts"),
    ),
    _sigmoid(
        "mimo_v2_flash",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        "MiMo-V2-Flash",
        shared_targets=(),
    ),
    _softmax(
        "minimax",
        "minimax",
        "MiniMaxForCausalLM",
        "MiniMax-01",
        attention_targets=(*QKVO, *under("self_attn", "qkv_proj", "output_gate", "out_proj")),
        disk=W1_W3_W2,
        num_experts=_key("num_local_experts"),
        renormalize=_yes,
        expert_width=_key("intermediate_size"),
    ),
    _sigmoid(
        "minimax_m2",
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        "MiniMax-M2",
        shared_targets=(),
        disk=replace(W1_W3_W2, router_bias="e_score_correction_bias"),
        num_experts=_key("num_local_experts"),
        renormalize=_yes,
        scaling=_unscaled,
        groups=_ungrouped,
        expert_width=_key("intermediate_size"),
    ),
    _sigmoid(
        "minimax_m3",
        "minimax_m3_vl_text",
        "MiniMaxM3VLForCausalLM",
        "MiniMax-M3 (text)",
        shared_targets=under("mlp.shared_experts", "gate_up_proj", "down_proj"),
        disk=_STACKS,
        num_experts=_key("num_local_experts"),
        renormalize=_yes,
        scaling=_unscaled,
        groups=_ungrouped,
        expert_width=_key("intermediate_size"),
    ),
    _softmax(
        "qwen2_moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        shared_targets=SHARED_EXPERT,
    ),
    _softmax(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        "Qwen3.5-MoE",
        attention_targets=(*QKVO, *LINEAR_ATTENTION),
        shared_targets=SHARED_EXPERT,
        renormalize=_yes,
    ),
    _softmax(
        "qwen3_next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "Qwen3-Next-80B-A3B",
        attention_targets=(*QKVO, *LINEAR_ATTENTION),
        shared_targets=SHARED_EXPERT,
    ),
    _sigmoid("solar_open", "solar_open", "SolarOpenForCausalLM", "Solar Open"),
)
