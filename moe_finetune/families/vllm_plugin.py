"""vLLM's general plugin: tell its config loader what ``model_type: deepseek`` is.

vLLM has the architecture ``DeepseekForCausalLM`` but finds no config class for it. It loads plugins
in every process it starts, sometimes twice in one.
"""

from __future__ import annotations


def register() -> None:
    """Register the config of DeepSeek-MoE with transformers; repeatable."""
    from transformers import AutoConfig

    from moe_finetune.families.deepseek_moe.configuration import DeepseekConfig

    AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)
