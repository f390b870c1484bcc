"""DeepSeek-MoE's MoE layers, and options that no release uses."""

from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.base import after_dense_layers, require


def moe_layers(config: Any) -> list[int]:
    """Layers whose MLP is a MoE block: every ``moe_layer_freq``-th after the dense ones."""
    return [layer for layer in after_dense_layers(config) if layer % config.moe_layer_freq == 0]


def check(config: Any) -> None:
    """Raise UnsupportedModelError for config options that no release uses."""
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
