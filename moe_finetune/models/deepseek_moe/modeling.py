"""DeepSeek-MoE: Llama with fine-grained routed and shared experts.

Dai et al., "DeepSeekMoE", arXiv 2401.06066, equations 9-11. Attention is Llama's; dense MLPs and
fused experts are the same as DeepSeek-V2's. Shape legend: T tokens, E routed experts, K selected
per token, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.modeling_utils import PreTrainedModel
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

from moe_finetune.models.deepseek_moe.configuration import DeepseekConfig
from moe_finetune.models.deepseek_moe.facts import check, moe_layers

# Declared for another config, but reads only fields that this one has too.
_MLP: Any = DeepseekV2MLP


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
        sparse = layer_idx in moe_layers(config)
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
        std = self.config.initializer_range
        if isinstance(module, DeepseekV2Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, DeepseekRouter):
            init.normal_(module.weight, mean=0.0, std=std)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """The decoder; ``forward`` is Llama's and passes its keyword arguments to every layer."""

    def __init__(self, config: DeepseekConfig):
        check(config)
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


def register_names(model_type: str) -> None:
    """Register names on disk; transformers applies them on load and the inverse on save.

    ``mlp.experts.M.{gate,up}_proj.weight`` (D, H) <-> ``mlp.experts.gate_up_proj`` (E, 2D, H), gate
    rows first; ``mlp.experts.M.down_proj.weight`` (H, D) <-> ``mlp.experts.down_proj`` (E, H, D).
    """
    register_checkpoint_conversion_mapping(
        model_type,
        [
            WeightConverter(
                source_patterns=[
                    "mlp.experts.*.gate_proj.weight",
                    "mlp.experts.*.up_proj.weight",
                ],
                target_patterns="mlp.experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns="mlp.experts.*.down_proj.weight",
                target_patterns="mlp.experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
        overwrite=True,
    )
