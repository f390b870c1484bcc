"""Composites with a MoE language part, and language parts that exist only in a composite."""

from dataclasses import replace
from typing import Any

from moe_finetune.models import table_core, table_other, table_sigmoid, table_softmax
from moe_finetune.models.base import (
    MLA,
    SHARED_EXPERTS,
    UNREAD_POSITIONS,
    Family,
    Rows,
    after_dense_layers,
    expert_groups,
    require,
    under,
)
from moe_finetune.models.composite import composite
from moe_finetune.models.standard import STACKS, W1_W3_W2, key, scaled, sigmoid, softmax, yes

LLAVA = "language_model.model."
"""Prefix of the language part in the files of Llava and similar models."""

_ALONE: dict[str, Family] = {
    family.model_type: family
    for family in (
        *table_core.FAMILIES,
        *table_softmax.FAMILIES,
        *table_sigmoid.FAMILIES,
        *table_other.FAMILIES,
    )
}


def _sparse(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]


def _limited_groups(config: Any) -> tuple[int, int]:
    return (1, 1) if config.topk_method == "greedy" else expert_groups(config)


def _check_mistral4(config: Any) -> None:
    require(config, n_group=(1,))  # groups are taken by their two best experts


_DEEPSEEK_OCR2 = softmax(
    "deepseek_ocr2_text",
    "DeepSeek-OCR 2",
    shared_targets=SHARED_EXPERTS,
    num_experts=key("n_routed_experts"),
    renormalize=lambda config: False,
    scaling=scaled(),
    groups=_limited_groups,
    moe_layers=_sparse,
)
_GLM4V = sigmoid("glm4v_moe_text", "GLM-4.5V", moe_layers=after_dense_layers, rows=UNREAD_POSITIONS)
_GLM5_NEXT = sigmoid(
    "glm5_next_text",
    "GLM-5 Next",
    attention_targets=(
        *MLA,
        *under("self_attn", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj"),
    ),
    moe_layers=_sparse,
    rows=Rows(per_sequence=("Glm5NextTextLinearAttention", "Glm5NextTextAttention")),
)
_MISTRAL4 = softmax(
    "mistral4",
    "Mistral Small 4",
    attention_targets=MLA,
    shared_targets=SHARED_EXPERTS,
    disk=replace(STACKS, router_bias=None),
    num_experts=key("n_routed_experts"),
    scaling=scaled(),
    moe_layers=after_dense_layers,
    check=_check_mistral4,
    rows=Rows(padding="moves"),
)
_QWEN3_VL = softmax(
    "qwen3_vl_moe_text", "Qwen3-VL-MoE", renormalize=yes, disk=replace(STACKS, router_bias=None)
)

PARTS = (_DEEPSEEK_OCR2, _GLM4V, _GLM5_NEXT, _MISTRAL4, _QWEN3_VL)

FAMILIES = (
    composite("aria", "Aria", _ALONE["aria_text"], LLAVA),
    composite("deepseek_ocr2", "DeepSeek-OCR 2", _DEEPSEEK_OCR2, "model."),
    composite("gemma4", "Gemma 4", _ALONE["gemma4_text"]),
    composite("glm4v_moe", "GLM-4.5V", _GLM4V),
    composite("glm5_next", "GLM-5 Next", _GLM5_NEXT),
    composite(
        "inkling_mm_model",
        "Inkling",
        _ALONE["inkling_text"],
        "model.llm.",
        router_bias="gate.bias",
        gate_up="experts.w13_weight",
        down="experts.w2_weight",
    ),
    composite("internvl", "InternVL3.5-30B-A3B", _ALONE["qwen3_moe"], LLAVA),
    composite(
        "internvl",
        "InternVL3.5-GPT-OSS-20B-A4B",
        _ALONE["gpt_oss"],
        LLAVA,
        name="internvl_gpt_oss",
    ),
    composite(
        "minimax_m3_vl",
        "MiniMax-M3",
        _ALONE["minimax_m3_vl_text"],
        LLAVA,
        block=LLAVA + "layers.{layer}.block_sparse_moe",
        router_bias="e_score_correction_bias",
        gate=W1_W3_W2.gate,
        up=W1_W3_W2.up,
        gate_up=None,
        down=W1_W3_W2.down,
    ),
    composite("mistral3", "Mistral Small 4", _MISTRAL4, LLAVA),
    composite(
        "nemotron_h_omni",
        "Nemotron 3 Omni",
        _ALONE["nemotron_h"],
        "language_model.backbone.",
        backbone="language_model.model",
    ),
    composite("qwen3_5_moe", "Qwen3.5-35B-A3B", _ALONE["qwen3_5_moe_text"]),
    composite("qwen3_vl_moe", "Qwen3-VL-30B-A3B", _QWEN3_VL),
    composite("qwen4_exp", "Qwen4-Exp", _ALONE["qwen4_exp_text"]),
)

NO_INTERFACE = "its experts do not follow transformers' experts interface"
REFUSED = {
    "deepseek_vl_v2": (
        "its config.json needs remote code, which is never run; for DeepSeek-OCR 2 use the "
        "files for transformers' class (model_type deepseek_ocr2, such as "
        "deepseek-community/DeepSeek-OCR-2)"
    ),
    "diffusion_gemma": "its language model denoises blocks and has no next-token loss",
    "ernie4_5_vl_moe": (
        "its files store text and vision experts in one list, which a merge cannot separate; "
        "ernie4_5_moe is supported"
    ),
    "kimi_k25": (
        "transformers 5.19 saves its layers under names that differ from the published ones; "
        "only its language model, a deepseek_v3, is supported"
    ),
    "llama4": NO_INTERFACE,
    "qwen3_omni_moe": (
        "it consists of several language models, for text and speech; qwen3_vl_moe and "
        "qwen3_moe are supported"
    ),
    "qwen3_omni_moe_thinker": (
        "it is published only as part of qwen3_omni_moe; qwen3_vl_moe and qwen3_moe are supported"
    ),
    "step3p7": NO_INTERFACE,
}
"""Why other composites with a MoE language part cannot be trained, by ``model_type``."""
