"""Families with a softmax router; facts from each class in transformers 5.19."""

from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.base import (
    GATED_MLP,
    QKVO,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    UNREAD_POSITIONS,
    DiskLayout,
    Rows,
    require,
    under,
)
from moe_finetune.models.standard import (
    GRANITE_SHARED,
    LINEAR_ATTENTION,
    W1_W3_W2,
    granite,
    key,
    same_in_all_layers,
    softmax,
    yes,
)


def _check_cohere(config: Any) -> None:
    require(config, expert_selection_fn=("softmax",))


def _check_gpt_oss(config: Any) -> None:
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{config.model_type}: the checkpoint is quantized; save it in bfloat16 first "
            "(transformers: Mxfp4Config(dequantize=True)), or use one that is unquantized"
        )


def _check_hunyuan(config: Any) -> None:
    for name in ("num_experts", "moe_topk"):
        same_in_all_layers(name)(config)


FAMILIES = (
    softmax(
        "aria_text",
        "Aria (text)",
        shared_targets=SHARED_EXPERTS,
        disk=DiskLayout(
            router="router.weight",
            gate_up="experts.fc1.weight",
            down="experts.fc2.weight",
        ),
        router_name="router",
        router_returns=("index", "weights", "logits"),
        num_experts=key("moe_num_experts"),
        top_k=key("moe_topk"),
        renormalize=yes,
        expert_width=key("intermediate_size"),
    ),
    softmax(
        "cohere2_moe",
        "Cohere 2 MoE",
        renormalize=yes,
        expert_width=key("intermediate_size"),
        check=_check_cohere,
    ),
    softmax(
        "ernie4_5_moe",
        "ERNIE 4.5",
        shared_targets=SHARED_EXPERTS,
        disk=DiskLayout(router_bias="moe_statics.e_score_correction_bias"),
        num_experts=key("moe_num_experts"),
        top_k=key("moe_k"),
        renormalize=yes,
    ),
    softmax("flex_olmo", "FlexOlmo", expert_width=key("intermediate_size")),
    softmax(
        "gpt_oss",
        "gpt-oss",
        check=_check_gpt_oss,
        disk=DiskLayout(
            router="router.weight",
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
        ),
        router_name="router",
        num_experts=key("num_local_experts"),
        renormalize=yes,
        expert_width=key("intermediate_size"),
        rows=UNREAD_POSITIONS,
    ),
    granite("granitemoe", "Granite 3 MoE"),
    granite(
        "granitemoehybrid",
        "Granite 4 (Mamba hybrid)",
        attention_targets=(*QKVO, "mamba.in_proj"),
        shared_targets=GRANITE_SHARED,
        rows=Rows(masks_by_position=False, per_sequence=("GraniteMoeHybridMambaLayer",)),
    ),
    granite(
        "granitemoe_swa",
        "Granite MoE SWA",
        shared_targets=GRANITE_SHARED,
        disk=DiskLayout(
            block="model.layers.{layer}.block_sparse_moe",
            router="router.weight",
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
        ),
        router_returns=("logits", "weights", "index"),
    ),
    granite("granitemoeshared", "Granite MoE shared", shared_targets=GRANITE_SHARED),
    softmax(
        "hunyuan_v1_moe",
        "Hunyuan-A13B",
        shared_targets=under("mlp.shared_mlp", *GATED_MLP),
        disk=DiskLayout(router="gate.wg.weight"),
        router_weight="wg.weight",
        top_k=same_in_all_layers("moe_topk"),
        renormalize=yes,
        expert_width=key("intermediate_size"),
        check=_check_hunyuan,
        rows=Rows(padding="moves"),
    ),
    softmax("mellum", "Mellum", num_experts=key("num_local_experts")),
    softmax(
        "minimax",
        "MiniMax-01",
        attention_targets=(*QKVO, *under("self_attn", "qkv_proj", "output_gate", "out_proj")),
        disk=W1_W3_W2,
        num_experts=key("num_local_experts"),
        renormalize=yes,
        expert_width=key("intermediate_size"),
        # Its cache takes its length from the first layer, which is linear and has none.
        rows=Rows(per_sequence=("MiniMaxLightningAttention",), generates_padded=False),
    ),
    softmax("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", shared_targets=SHARED_EXPERT),
    softmax(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE (text)",
        attention_targets=(*QKVO, *LINEAR_ATTENTION),
        shared_targets=SHARED_EXPERT,
        renormalize=yes,
        rows=Rows(per_sequence=("Qwen3_5MoeGatedDeltaNet",)),
    ),
    softmax(
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        attention_targets=(*QKVO, *LINEAR_ATTENTION),
        shared_targets=SHARED_EXPERT,
        rows=Rows(per_sequence=("Qwen3NextGatedDeltaNet",)),
    ),
    softmax(
        "qwen4_exp_text",
        "Qwen4-Exp",
        attention_targets=(*QKVO, *LINEAR_ATTENTION),
        shared_targets=SHARED_EXPERT,
        rows=Rows(per_sequence=("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer")),
    ),
)
