"""DeepSeek-MoE-16B (``model_type: deepseek``): a native class, since transformers 5 has none."""

from moe_finetune.models.base import QKVO, SHARED_EXPERTS, Family
from moe_finetune.models.deepseek_moe.facts import check, moe_layers


def register_config() -> None:
    """Register ``model_type: deepseek`` with AutoConfig and AutoTokenizer; safe to call again."""
    from transformers import AutoConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    from moe_finetune.models.deepseek_moe.configuration import DeepseekConfig

    AutoConfig.register(FAMILY.model_type, DeepseekConfig, exist_ok=True)
    # The published files name LlamaTokenizerFast, from which transformers 5 rebuilds a tokenizer
    # with Llama's splitting instead of taking tokenizer.json as it is. It corrects this itself for
    # the DeepSeek models that it knows, in this mapping.
    TOKENIZER_MAPPING_NAMES[FAMILY.model_type] = "TokenizersBackend"


def register() -> None:
    """Register the model with transformers' Auto classes, and its names on disk; repeatable."""
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
