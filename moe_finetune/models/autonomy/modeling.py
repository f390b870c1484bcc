"""OLMoE whose experts rank themselves: no router, but a factorized gate projection per expert.

Lv et al., "Autonomy-of-Experts Models", arXiv 2501.13074. For token x, every expert e computes
``p_e = A_e x``, r numbers; the K experts with the largest ``|p_e|`` continue: ``y_e = W_e (act(B_e
p_e) * V_e x)``, weighted by the softmax of all experts' norms, as in the authors' implementation
(renormalized only with ``norm_topk_prob``). The default rank gives an expert as many weights as an
OLMoE expert of the same width (P2, appendix C.1).

Shape legend: T tokens, E experts, K selected per token, H hidden, D expert width, r rank, S = T*K
rows sorted by expert.
"""

# As text: transformers would check evaluated types before our checks, which name a remedy.
from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import OlmoeConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeAttention,
    OlmoeDecoderLayer,
    OlmoeForCausalLM,
    OlmoeModel,
    OlmoePreTrainedModel,
    OlmoeRMSNorm,
    OlmoeRotaryEmbedding,
)
from transformers.utils.output_capturing import OutputRecorder

from moe_finetune.torch_extension import is_fake


@strict
class AutonomyConfig(OlmoeConfig):
    """OLMoE's config and the gate's rank, by default ``HD / (H + D)`` for equally many weights."""

    model_type = "autonomy_of_experts"
    # OLMoE's plans for several devices name parameters that these experts lack.
    base_model_tp_plan = {}  # noqa: RUF012 (as transformers has it)
    base_model_ep_plan = {}  # noqa: RUF012

    gate_rank: int = 0

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        if self.gate_rank == 0:
            hidden, width = self.hidden_size, self.intermediate_size
            self.gate_rank = max(1, round(hidden * width / (hidden + width)))


class AutonomyGate(nn.Module):
    """The first factors of all experts' gates, and the selection by the norms of ``p``."""

    def __init__(self, config: AutonomyConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.gate_rank, config.hidden_size)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return norms (T, E) in float32 or wider, weights, index (T, K), projections (T, E, r)."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        experts, rank, _ = self.weight.shape
        low_TEr = linear(hidden_TH, self.weight.flatten(0, 1)).view(-1, experts, rank)
        wide = torch.promote_types(low_TEr.dtype, torch.float32)
        norms_TE = torch.linalg.vector_norm(low_TEr, dim=-1, dtype=wide)
        weights_TK, index_TK = norms_TE.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return norms_TE, weights_TK.to(hidden.dtype), index_TK, low_TEr


class AutonomyExperts(nn.Module):
    """The experts' other parts: the gates' second factors (E, D, r), ``up_proj`` (E, D, H) and
    ``down_proj`` (E, H, D).

    transformers' experts functions do not apply, because experts read the gate's results.
    """

    has_gate = has_bias = is_transposed = _is_expert_parallel = False
    is_concatenated = True

    def __init__(self, config: AutonomyConfig):
        super().__init__()
        self.config = config
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(experts, width, config.gate_rank))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, low_TEr: Tensor
    ) -> Tensor:
        """Return the weighted sum (T, H) of each token's K experts."""
        if self.config._experts_implementation != "eager":
            run = ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation]
            return run(self, hidden_TH, index_TK, weights_TK, low_TEr)
        return self.run(hidden_TH, index_TK, weights_TK, low_TEr)[0]

    def run(
        self, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, low_TEr: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sum (T, H), the activations (T, K, D) and the outputs (T, K, H).

        Every gather reads each row once, so gradients are deterministic.
        """
        (tokens, selected), (experts, hidden, width) = index_TK.shape, self.down_proj.shape
        flat_S, order_S = index_TK.reshape(-1).sort(stable=True)
        slots_S = order_S.argsort()
        x_SH = hidden_TH.unsqueeze(1).expand(-1, selected, -1).reshape(-1, hidden)
        x_SH = x_SH.index_select(0, order_S)  # whose backward is faster than indexing's
        token_S = order_S.div(selected, rounding_mode="floor")
        low_Sr = low_TEr.flatten(0, 1).index_select(0, token_S * experts + flat_S)
        sizes = _rows_of_experts(flat_S, experts)
        # Unbound once: the backward of selecting an expert would write the whole stack for each.
        weights = (self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind())
        rows = (x_SH.split(sizes), low_Sr.split(sizes))
        z, y = [], []
        for x, low, gate_Dr, up_DH, down_HD in zip(*rows, *weights, strict=True):
            z.append(self.act_fn(linear(low, gate_Dr)) * linear(x, up_DH))
            y.append(linear(z[-1], down_HD))
        z_TKD = torch.cat(z).index_select(0, slots_S).view(tokens, selected, width)
        y_TKH = torch.cat(y).index_select(0, slots_S).view(tokens, selected, hidden)
        out_TH = (weights_TK.unsqueeze(-1).to(y_TKH.dtype) * y_TKH).sum(1)
        return out_TH, z_TKD, y_TKH


def _rows_of_experts(flat_S: Tensor, experts: int) -> list[int]:
    """Number of selected pairs of each expert.

    Fake tensors, used to plan a step's memory, have no values to count; any numbers with the same
    sum take the same memory.
    """
    if is_fake(flat_S):
        rows_per_expert = flat_S.numel() // experts
        return [rows_per_expert] * (experts - 1) + [
            flat_S.numel() - rows_per_expert * (experts - 1)
        ]
    return flat_S.bincount(minlength=experts).tolist()


class AutonomyBlock(nn.Module):
    """Self-ranking experts instead of OLMoE's router and experts."""

    def __init__(self, config: AutonomyConfig):
        super().__init__()
        self.gate = AutonomyGate(config)
        self.experts = AutonomyExperts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, shaped like ``hidden`` (batch, sequence, H)."""
        _, weights_TK, index_TK, low_TEr = self.gate(hidden)
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        return self.experts(hidden_TH, index_TK, weights_TK, low_TEr).view_as(hidden)


class AutonomyDecoderLayer(OlmoeDecoderLayer):
    """OLMoE's layer around an :class:`AutonomyBlock`."""

    def __init__(self, config: AutonomyConfig, layer_idx: int):
        # Not OlmoeDecoderLayer's: it would allocate a router and experts.
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = OlmoeAttention(config=config, layer_idx=layer_idx)
        self.mlp = AutonomyBlock(config)  # type: ignore[assignment]
        self.input_layernorm = OlmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = OlmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class AutonomyPreTrainedModel(OlmoePreTrainedModel):
    """What transformers requires of the model's classes."""

    config: AutonomyConfig
    config_class = AutonomyConfig
    _no_split_modules = ["AutonomyDecoderLayer"]  # noqa: RUF012
    _can_set_experts_implementation_cached_value = False
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(AutonomyGate, index=0),
        "hidden_states": AutonomyDecoderLayer,
        "attentions": OlmoeAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AutonomyGate | AutonomyExperts):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class AutonomyModel(AutonomyPreTrainedModel, OlmoeModel):
    """The decoder; ``forward`` is OLMoE's."""

    def __init__(self, config: AutonomyConfig):
        PreTrainedModel.__init__(self, config)  # not OlmoeModel's, which builds OLMoE's layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            AutonomyDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = OlmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = OlmoeRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class AutonomyForCausalLM(AutonomyPreTrainedModel, OlmoeForCausalLM):
    """The language model; loss and generation are OLMoE's."""

    def __init__(self, config: AutonomyConfig):
        PreTrainedModel.__init__(self, config)
        self.model = AutonomyModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()
