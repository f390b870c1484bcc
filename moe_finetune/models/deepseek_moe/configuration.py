"""Config of DeepSeek-MoE-16B: Llama's fields and those of the MoE blocks, as published."""

# As text: transformers would check evaluated types before our checks, which name a remedy.
from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


@strict
class DeepseekConfig(LlamaConfig):
    """``config.json`` with ``model_type: deepseek``; defaults are those of the 16B model.

    ``auto_map`` in the published file names remote code. It is dropped, so the code is neither
    executed nor written back. ``aux_loss_alpha`` and ``seq_aux`` describe how the model was
    pretrained and change nothing here: balancing is a loss term of the recipe.
    """

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012 (as transformers has it)
    base_model_tp_plan = {  # noqa: RUF012
        **LlamaConfig.base_model_tp_plan,
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_experts.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
    }

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True

    def __post_init__(self, **kwargs: Any):
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)
