"""DeepSeek-MoE-16B (``model_type: deepseek``): Llama with routed and shared experts.

transformers has no class for it. Dai et al., "DeepSeekMoE", arXiv 2401.06066, equations 9-11.
Attention is Llama's; dense MLPs and fused experts are DeepSeek-V2's.
"""

# As text: transformers would check evaluated types before our checks, which name a remedy.
from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig
from transformers import initialization as init
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2MLP
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from moe_finetune.models.family_table import check_deepseek

# Declared for another config, but reads only fields that this one has too.
_MLP: Any = DeepseekV2MLP


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


class DeepseekRouter(nn.Module):
    """Softmax over all experts in float32, then greedy top-k, renormalized if configured."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (T, E), weights (T, K), both float32, and expert indices (T, K)."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        logits_TE = nn.functional.linear(hidden_TH.float(), self.weight.float())
        weights_TK, index_TK = logits_TE.softmax(-1).topk(self.top_k, dim=-1, sorted=False)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, index_TK


class DeepseekMoE(nn.Module):
    """The routed experts' weighted sum plus the shared experts, fused into one MLP."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.gate = DeepseekRouter(config)
        self.experts = DeepseekV2Experts(config)
        width = (config.n_shared_experts or 0) * config.moe_intermediate_size
        self.shared_experts = _MLP(config, intermediate_size=width) if width else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, shaped like ``hidden`` (batch, sequence, H)."""
        _, weights_TK, index_TK = self.gate(hidden)
        routed_TH = self.experts(hidden.reshape(-1, hidden.shape[-1]), index_TK, weights_TK)
        routed = routed_TH.view_as(hidden)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, with a MoE block as its MLP in the layers that the config selects."""

    def __init__(self, config: DeepseekConfig, layer_idx: int):
        # Not LlamaDecoderLayer's: it would allocate a dense MLP in every layer.
        super(LlamaDecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx)
        after_dense = layer_idx >= config.first_k_dense_replace
        sparse = after_dense and layer_idx % config.moe_layer_freq == 0
        self.mlp = DeepseekMoE(config) if sparse else _MLP(config)  # type: ignore[assignment]
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """What transformers requires of the model's classes."""

    config: DeepseekConfig
    config_class = DeepseekConfig
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012
    # Transformers keeps what it found on the class it was asked of, and a dense Llama's "no" would
    # be inherited.
    _can_set_experts_implementation_cached_value = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DeepseekDecoderLayer,
        "attentions": LlamaAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekV2Experts | DeepseekRouter):
            for parameter in module.parameters():
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """The decoder; ``forward`` is Llama's and passes its keyword arguments to every layer."""

    def __init__(self, config: DeepseekConfig):
        check_deepseek(config)
        PreTrainedModel.__init__(self, config)  # not LlamaModel's, which builds Llama's layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            DeepseekDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    """The language model; loss, generation and ``logits_to_keep`` are Llama's."""

    def __init__(self, config: DeepseekConfig):
        PreTrainedModel.__init__(self, config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register_config() -> None:
    """Register ``model_type: deepseek`` with AutoConfig and AutoTokenizer; safe to call again."""
    AutoConfig.register("deepseek", DeepseekConfig, exist_ok=True)
    # The published files name LlamaTokenizerFast, from which transformers 5 rebuilds a tokenizer
    # with Llama's splitting instead of taking tokenizer.json as it is. It corrects this itself for
    # the DeepSeek models that it knows, in this mapping.
    TOKENIZER_MAPPING_NAMES["deepseek"] = "TokenizersBackend"


def register() -> None:
    """Register the model with transformers' Auto classes, and its names in files; repeatable."""
    register_config()
    AutoModel.register(DeepseekConfig, DeepseekModel, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    names = get_checkpoint_conversion_mapping("deepseek_v2")
    register_checkpoint_conversion_mapping("deepseek", names, overwrite=True)
