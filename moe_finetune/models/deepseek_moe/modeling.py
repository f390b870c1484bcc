"""DeepSeek-MoE: Llama with fine-grained routed experts beside shared ones.

Dai et al., "DeepSeekMoE", arXiv 2401.06066, equations 9-11. Shape legend: T tokens, E routed
experts, K selected per token, H hidden, D expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.modeling_utils import PreTrainedModel
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


class DeepseekMLP(nn.Module):
    """Gated MLP of a given width without biases: the dense layers' and the shared experts'."""

    def __init__(self, config: DeepseekConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``down(act(gate(x)) * up(x))``, shaped like ``hidden`` (..., H)."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


@use_experts_implementation
class DeepseekExperts(nn.Module):
    """The routed experts, fused: ``gate_up_proj`` (E, 2D, H) with gate rows first, ``down_proj``.

    ``forward`` is the plain loop over experts; ``config._experts_implementation`` picks a faster
    one that computes the same.
    """

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.num_experts = config.n_routed_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        )
        self.down_proj = nn.Parameter(
            torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim)
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum (T, H) of each token's K experts."""
        output_TH = torch.zeros_like(hidden_TH)
        for expert in index_TK.unique().tolist():
            if expert >= self.num_experts:  # expert parallelism marks experts of other ranks so
                continue
            token, slot = torch.where(index_TK == expert)
            gate, up = nn.functional.linear(hidden_TH[token], self.gate_up_proj[expert]).chunk(
                2, -1
            )
            out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out = out * weights_TK[token, slot, None]
            output_TH.index_add_(0, token, out.to(output_TH.dtype))
        return output_TH


class DeepseekRouter(nn.Module):
    """Softmax over all experts in float32, then greedy top-k, renormalised only where asked."""

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
    """Routed experts' weighted sum plus the shared experts, which are one MLP of their width."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.gate = DeepseekRouter(config)
        self.experts = DeepseekExperts(config)
        self.shared_experts = (
            DeepseekMLP(config, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, shaped like ``hidden`` (batch, sequence, H)."""
        _, weights_TK, index_TK = self.gate(hidden)
        routed_TH = self.experts(hidden.reshape(-1, hidden.shape[-1]), index_TK, weights_TK)
        routed = routed_TH.view_as(hidden)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, whose MLP is a MoE block in the layers that the config says."""

    def __init__(self, config: DeepseekConfig, layer_idx: int):
        # Not LlamaDecoderLayer's: it would allocate a dense MLP in every layer.
        super(LlamaDecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx)
        sparse = layer_idx in moe_layers(config)
        mlp = DeepseekMoE(config) if sparse else DeepseekMLP(config, config.intermediate_size)
        self.mlp = mlp  # type: ignore[assignment]
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """What transformers asks of the model's classes."""

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
        if isinstance(module, DeepseekExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, DeepseekRouter):
            init.normal_(module.weight, mean=0.0, std=std)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """The decoder; ``forward`` is Llama's and hands its keyword arguments to every layer."""

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
