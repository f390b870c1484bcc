"""Families on which every feature is tested, vLLM included."""

from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import deepseek_moe
from moe_finetune.models.base import MLA, SHARED_EXPERTS, after_dense_layers, expert_groups, require
from moe_finetune.models.standard import W1_W3_W2, every_layer, key, scaled, sigmoid, softmax, yes


def _check_deepseek_v2(config: Any) -> None:
    require(
        config,
        topk_method=("greedy", "group_limited_greedy"),
        scoring_func=("softmax",),
        norm_topk_prob=(False,),
        moe_layer_freq=(1,),
    )


def _check_deepseek_v3(config: Any) -> None:
    require(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",), moe_layer_freq=(1,))


def _qwen3_layers(config: Any) -> list[int]:
    return [
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ]


def _check_qwen3(config: Any) -> None:
    if not _qwen3_layers(config):
        raise UnsupportedModelError("this qwen3_moe config has no MoE layer (mlp_only_layers)")


FAMILIES = (
    deepseek_moe.FAMILY,
    softmax(
        "deepseek_v2",
        "DeepSeek-V2-Lite",
        attention_targets=MLA,
        shared_targets=SHARED_EXPERTS,
        num_experts=key("n_routed_experts"),
        renormalize=lambda config: False,
        scaling=scaled(),
        groups=expert_groups,
        moe_layers=after_dense_layers,
        check=_check_deepseek_v2,
        bias_export="noaux_tc",
    ),
    sigmoid(
        "deepseek_v3",
        "DeepSeek-V3, R1, Kimi-K2, Moonlight",
        attention_targets=MLA,
        moe_layers=after_dense_layers,
        check=_check_deepseek_v3,
    ),
    softmax("qwen3_moe", "Qwen3-30B-A3B", moe_layers=_qwen3_layers, check=_check_qwen3),
    softmax(
        "olmoe",
        "OLMoE-1B-7B",
        moe_layers=every_layer,
        expert_width=key("intermediate_size"),
    ),
    softmax(
        "mixtral",
        "Mixtral-8x7B",
        disk=W1_W3_W2,
        num_experts=key("num_local_experts"),
        renormalize=yes,
        moe_layers=every_layer,
        expert_width=key("intermediate_size"),
    ),
)
