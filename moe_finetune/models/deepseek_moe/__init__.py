"""DeepSeek-MoE-16B (``model_type: deepseek``): a native class, since transformers 5 has none."""

from __future__ import annotations

from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.base import QKVO, SHARED_EXPERTS, Family, require


def register_config() -> None:
    """Make AutoConfig and AutoTokenizer know ``model_type: deepseek``; repeatable."""
    from transformers import AutoConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    from moe_finetune.models.deepseek_moe.configuration import DeepseekConfig

    AutoConfig.register(FAMILY.model_type, DeepseekConfig, exist_ok=True)
    # The published files name LlamaTokenizerFast, from which transformers 5 rebuilds a tokenizer
    # with Llama's splitting instead of taking tokenizer.json as it is. It corrects this itself for
    # the DeepSeek models that it knows, in this mapping.
    TOKENIZER_MAPPING_NAMES[FAMILY.model_type] = "TokenizersBackend"


def register() -> None:
    """Make transformers' Auto classes know the model and its names on disk; repeatable."""
    from transformers import AutoModel, AutoModelForCausalLM

    from moe_finetune.models.deepseek_moe.configuration import DeepseekConfig
    from moe_finetune.models.deepseek_moe.modeling import (
        DeepseekForCausalLM,
        DeepseekModel,
        register_names,
    )

    register_config()
    AutoModel.register(DeepseekConfig, DeepseekModel, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    register_names(FAMILY.model_type)


def moe_layers(config: Any) -> list[int]:
    """Layers whose MLP is a MoE block: every ``moe_layer_freq``-th after the dense ones."""
    return [
        layer
        for layer in range(config.first_k_dense_replace, config.num_hidden_layers)
        if layer % config.moe_layer_freq == 0
    ]


def check(config: Any) -> None:
    """Raise UnsupportedModelError for options of the public config that no release uses."""
    require(config, scoring_func=("softmax",))
    if config.num_experts_per_tok > config.n_routed_experts:
        raise UnsupportedModelError(
            f"deepseek: num_experts_per_tok {config.num_experts_per_tok} is more than "
            f"n_routed_experts {config.n_routed_experts}"
        )
    if not moe_layers(config):
        raise UnsupportedModelError(
            f"deepseek: no MoE layer among {config.num_hidden_layers} with first_k_dense_replace "
            f"{config.first_k_dense_replace} and moe_layer_freq {config.moe_layer_freq}"
        )


FAMILY = Family(
    name="deepseek_moe",
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    title="DeepSeek-MoE-16B",
    score="softmax",
    attention_targets=QKVO,
    shared_targets=SHARED_EXPERTS,
    num_experts=lambda config: config.n_routed_experts,
    moe_layers=moe_layers,
    check=check,
)
