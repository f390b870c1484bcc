"""Families with experts of their own config; facts from each class in transformers 5.19.

Their experts follow transformers' common experts interface. A row states what differs from the
router of its kind, :mod:`moe_finetune.models.family_rows`.
"""

from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.family import QKVO, UNREAD_POSITIONS, Rows, expert_groups, require, under
from moe_finetune.models.family_rows import (
    granite,
    requires,
    same_in_all_layers,
    scaled,
    sigmoid,
    softmax,
    ungrouped,
    unscaled,
    yes,
)


def check_deepseek(config: Any) -> None:
    """Raise UnsupportedModelError for options of DeepSeek-MoE that no release uses."""
    require(config, scoring_func=("softmax",))
    if config.num_experts_per_tok > config.n_routed_experts:
        raise UnsupportedModelError(
            f"deepseek: num_experts_per_tok {config.num_experts_per_tok} is more than "
            f"n_routed_experts {config.n_routed_experts}"
        )


def _check_gpt_oss(config: Any) -> None:
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{config.model_type}: the checkpoint is quantized; save it in bfloat16 first "
            "(transformers: Mxfp4Config(dequantize=True)), or use one that is unquantized"
        )


def _hash_layers(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "hash_moe"]


CORE = (
    softmax(
        "deepseek",
        "DeepSeek-MoE-16B",
        name="deepseek_moe",
        architecture="DeepseekForCausalLM",
        check=check_deepseek,
    ),
    softmax(
        "deepseek_v2",
        "DeepSeek-V2-Lite",
        renormalize=lambda config: False,
        scaling=scaled(),
        groups=expert_groups,
        check=requires(
            topk_method=("greedy", "group_limited_greedy"),
            scoring_func=("softmax",),
            norm_topk_prob=(False,),
            moe_layer_freq=(1,),
        ),
        bias_export="noaux_tc",
    ),
    sigmoid(
        "deepseek_v3",
        "DeepSeek-V3, R1, Kimi-K2, Moonlight",
        check=requires(topk_method=("noaux_tc",), scoring_func=("sigmoid",), moe_layer_freq=(1,)),
    ),
    softmax("qwen3_moe", "Qwen3-30B-A3B"),
    softmax("olmoe", "OLMoE-1B-7B"),
    softmax("mixtral", "Mixtral-8x7B", renormalize=yes),
)
"""Families on which every feature is tested, vLLM included."""

SOFTMAX = (
    softmax(
        "aria_text",
        "Aria (text)",
        router_returns=("index", "weights", "logits"),
        renormalize=yes,
    ),
    softmax(
        "cohere2_moe",
        "Cohere 2 MoE",
        renormalize=yes,
        check=requires(expert_selection_fn=("softmax",)),
    ),
    softmax("ernie4_5_moe", "ERNIE 4.5", renormalize=yes),
    softmax("flex_olmo", "FlexOlmo"),
    softmax(
        "gpt_oss",
        "gpt-oss",
        check=_check_gpt_oss,
        renormalize=yes,
        rows=UNREAD_POSITIONS,
    ),
    granite("granitemoe", "Granite 3 MoE"),
    granite(
        "granitemoehybrid",
        "Granite 4 (Mamba hybrid)",
        attention_targets=(*QKVO, "mamba.in_proj"),
        rows=Rows(masks_by_position=False, per_sequence=("GraniteMoeHybridMambaLayer",)),
    ),
    granite(
        "granitemoe_swa",
        "Granite MoE SWA",
        router_returns=("logits", "weights", "index"),
    ),
    granite("granitemoeshared", "Granite MoE shared"),
    softmax(
        "hunyuan_v1_moe",
        "Hunyuan-A13B",
        top_k=same_in_all_layers("moe_topk"),
        renormalize=yes,
        rows=Rows(padding="moves"),
    ),
    softmax("mellum", "Mellum"),
    softmax(
        "minimax",
        "MiniMax-01",
        renormalize=yes,
        # Its cache takes its length from the first layer, which is linear and has none.
        rows=Rows(per_sequence=("MiniMaxLightningAttention",), generates_padded=False),
    ),
    softmax("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    softmax(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE (text)",
        renormalize=yes,
        rows=Rows(per_sequence=("Qwen3_5MoeGatedDeltaNet",)),
    ),
    softmax(
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        rows=Rows(per_sequence=("Qwen3NextGatedDeltaNet",)),
    ),
    softmax(
        "qwen4_exp_text",
        "Qwen4-Exp",
        rows=Rows(per_sequence=("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer")),
    ),
)

SIGMOID = (
    sigmoid(
        "afmoe",
        "AFMoE (Trinity)",
        renormalize=yes,
        scaling=scaled("route_scale"),
        groups=ungrouped,
        rows=UNREAD_POSITIONS,
    ),
    sigmoid("axk1", "A.X K1"),
    sigmoid("axk2", "A.X K2"),
    sigmoid("deepseek_v32", "DeepSeek-V3.2"),
    sigmoid("dots1", "dots.llm1"),
    sigmoid("exaone_moe", "EXAONE MoE"),
    sigmoid("glm4_moe", "GLM-4.5"),
    sigmoid("glm4_moe_lite", "GLM-4.7-Flash"),
    sigmoid("glm_moe_dsa", "GLM-5"),
    sigmoid(
        "hy_v3",
        "Hunyuan 3",
        renormalize=yes,
        scaling=scaled("router_scaling_factor"),
        groups=ungrouped,
    ),
    sigmoid("hy_v4", "Hunyuan 4"),
    sigmoid(
        "kimi_linear",
        "Kimi-Linear-48B-A3B",
        rows=Rows(per_sequence=("KimiLinearDeltaAttention",)),
    ),
    sigmoid(
        "laguna",
        "Laguna",
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
    ),
    sigmoid(
        "lfm2_moe",
        "LFM2 MoE",
        groups=ungrouped,
        rows=Rows(per_sequence=("Lfm2MoeShortConv",)),
    ),
    sigmoid("mimo_v2_flash", "MiMo-V2-Flash"),
    sigmoid(
        "minimax_m2",
        "MiniMax-M2",
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
    ),
    sigmoid(
        "minimax_m3_vl_text",
        "MiniMax-M3 (text)",
        renormalize=yes,
        scaling=unscaled,
        groups=ungrouped,
    ),
    sigmoid(
        "nemotron_h",
        "Nemotron 3 (Mamba hybrid)",
        attention_targets=under("mixer", "q_proj", "k_proj", "v_proj", "o_proj", "in_proj"),
        rows=Rows(per_sequence=("NemotronHMamba2Mixer",)),
    ),
    sigmoid("solar_open", "Solar Open"),
)
"""DeepSeek-V3's router."""

OTHERS = (
    sigmoid(
        "deepseek_v4",
        "DeepSeek-V4",
        score="sqrtsoftplus",
        # Not o_a_proj, which multiplies each group of heads by its own matrix.
        attention_targets=under("self_attn", "q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"),
        renormalize=yes,
        groups=ungrouped,
        fixed_layers=_hash_layers,
        check=requires(scoring_func=("sqrtsoftplus",)),
        # Keys are compressed in windows counted from the first position, padding included.
        rows=Rows(per_sequence=("DeepseekV4Attention",), padding="read", generates_padded=False),
    ),
    softmax(
        "gemma4_text",
        "Gemma 4 (text)",
        router_returns=("probabilities", "weights", "index"),
        router_logits="proj",
        renormalize=yes,
        own_weights="each expert's weight is scaled by a learned factor",
    ),
    sigmoid(
        "inkling_text",
        "Inkling (text)",
        router_returns=("logits", "weights", "index", "shared weights"),
        renormalize=yes,
        scaling=scaled("route_scale"),
        own_weights="they are normalized together with the shared experts' weights",
        proportional=True,
        groups=ungrouped,
        bias_export="none",
        rows=Rows(per_sequence=("InklingShortConvolution",)),
    ),
    softmax(
        "jamba",
        "Jamba (Mamba hybrid)",
        attention_targets=(*QKVO, *under("mamba", "in_proj", "x_proj", "out_proj")),
        router_returns=("logits",),
        renormalize=lambda config: False,
        rows=Rows(per_sequence=("JambaMambaMixer",)),
    ),
    softmax(
        "phimoe",
        "Phi-3.5-MoE",
        renormalize=lambda config: False,
        own_weights="SparseMixer selects one expert after another and samples them in training",
    ),
)
"""Other kinds of routers."""

FAMILIES = tuple(sorted((*SOFTMAX, *SIGMOID, *OTHERS), key=lambda family: family.name))
