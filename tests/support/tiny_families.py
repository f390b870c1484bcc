"""A tiny random model of every family of the table, from one set of sizes, no two of them equal."""

from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import class_of
from tests.support.tiny_composites import AROUND

EXPERTS, TOP_K, HIDDEN, WIDTH, LAYERS = 10, 3, 96, 40, 4

BIASES = ("e_score_correction_bias", "expert_bias", "proj_bias", "router.bias", "o_proj.bias")

_SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": HIDDEN,
    "intermediate_size": 72,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": 56,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
}
_MLA = {
    "q_lora_rank": 28,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 20,
    "head_dim": 16,
    "num_key_value_heads": 6,
}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 512}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
_MAMBA = {
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 11,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_GRANITE = {
    "num_local_experts": EXPERTS,
    "intermediate_size": WIDTH,
    "shared_intermediate_size": 56,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts": EXPERTS, "num_shared_experts": 2, "route_scale": 1.7},
    "aria_text": {
        "moe_num_experts": EXPERTS,
        "moe_topk": TOP_K,
        "intermediate_size": WIDTH,
        "moe_num_shared_experts": 3,
    },
    "axk1": _MLA,
    "bailing_hybrid": _MLA
    | {
        "num_local_experts": EXPERTS,
        "q_lora_rank": None,
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
    },
    "beam": {
        "num_experts": EXPERTS,
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "routed_scaling_factor": 1.7,
        "sliding_window": 20,
    },
    "dots3_note_text": _MLA
    | _INDEXER
    | {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)], "n_group": 1},
    "flint": {"num_experts": EXPERTS, "mlp_only_layers": [0], "sliding_window": 20},
    "lara_mini": _LINEAR
    | {
        "num_experts": EXPERTS,
        "layer_types": ["linear_attention", "sliding_attention"] * 2,
        "sliding_window": 20,
    },
    "sarvam_mla": _MLA,
    "axk2": _MLA | _INDEXER | {"n_group": None, "topk_group": None},
    "cohere2_moe": {"intermediate_size": WIDTH, "num_experts": EXPERTS, "pad_token_id": 3},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA | _INDEXER,
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 5},
        "intermediate_size": WIDTH,
        "num_key_value_heads": 1,
        "q_lora_rank": 28,
        "o_groups": 3,
        "o_lora_rank": 22,
        "hc_mult": 3,
        "swiglu_limit": 0.3,
    }
    | _INDEXER,
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS,
        "moe_k": TOP_K,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": LAYERS - 1,
    },
    "exaone_moe": {"num_experts": EXPERTS, "num_shared_experts": 2},
    "flex_olmo": {"intermediate_size": WIDTH, "num_experts": EXPERTS},
    "gemma4_text": {
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 24,
        "sliding_window": 20,
    },
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA | _INDEXER,
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "glm5_next_text": _MLA
    | _INDEXER
    | {
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 12,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "hc_mult": 3,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE | _MAMBA,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": {
        "num_experts": EXPERTS,
        "moe_topk": TOP_K,
        "intermediate_size": WIDTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "hy_v3": {
        "num_experts": EXPERTS,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.7,
        "enable_moe_fp32_combine": False,
    },
    "hy_v4": _MLA | _INDEXER | {"swiglu_limit": 0.3},
    "inkling_text": {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 32,
        "d_rel": 7,
        "rel_extent": 30,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "sliding_window_size": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "route_scale": 1.7,
    },
    "hy_v4_vl_text": _MLA
    | _INDEXER
    | {
        "swiglu_limit": 0.3,
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
        },
    },
    "inkling2_text": {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 32,
        "d_rel": 7,
        "rel_extent": 30,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "sliding_window_size": 20,
        "conv_kernel_size": 3,
        "route_scale": 1.7,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": 400,
    },
    "jamba": {
        "num_experts": EXPERTS,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 7,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 11,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 7,
    },
    "kimi_linear": _MLA
    | {
        "num_local_experts": EXPERTS,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 12,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
    },
    "kolibri1": {"num_experts": EXPERTS, "norm_topk_prob": False, "sliding_window": 20},
    "laguna": {"num_experts": EXPERTS, "moe_routed_scaling_factor": 1.7},
    "lfm2_moe": {
        "num_experts": EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
    },
    "mellum": {"num_local_experts": EXPERTS},
    "mistral4": _MLA
    | {
        "n_group": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
    },
    "mistral_large4_text": _MLA
    | _INDEXER
    | {"n_group": 1, "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]},
    "mimo_v2_flash": {
        "num_key_value_heads": 3,  # twice as many where attention slides
        "v_head_dim": 20,
    },
    "minimax": {
        "num_local_experts": EXPERTS,
        "intermediate_size": WIDTH,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "block_size": 8,
    },
    "minimax_m2": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "minimax_m3_vl_text": {
        "num_local_experts": EXPERTS,
        "intermediate_size": WIDTH,
        "dense_intermediate_size": 72,
        "shared_intermediate_size": 56,
        "head_dim": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "moe"],
        "ssm_state_size": 11,
        "mamba_num_heads": 12,
        "mamba_head_dim": 14,
        "n_groups": 2,
        "conv_kernel": 3,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 56,
        "moe_latent_size": 88,
    },
    "phimoe": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "num_experts_per_tok": 2},
    "unlimited_ocr_text": {
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen2_moe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "qwen3_5_moe_text": _LINEAR | {"num_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS},
    "qwen3_vl_moe_text": {
        "num_experts": EXPERTS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [8, 4, 4],
        },
    },
    "qwen3_next": _LINEAR | {"num_experts": EXPERTS},
    "qwen4_exp_text": _LINEAR
    | {
        "num_experts": EXPERTS,
        "hc_count": 3,
        "hc_lowrank": 14,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
}


def config(family: str, **changes: Any) -> Any:
    """The tiny config of a family of the table; ``changes`` are of its language part."""
    facts = FAMILIES[family]
    if not facts.part:
        return CONFIG_MAPPING[facts.model_type](**_sizes(family, changes))
    text = {"model_type": facts.part} | _sizes(facts.part, changes)
    around = AROUND[facts.model_type]
    tied = text["tie_word_embeddings"]
    kind = CONFIG_MAPPING[facts.model_type]
    return kind(text_config=text, tie_word_embeddings=tied, **around)


def _sizes(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    own = _CHANGES.get(family, {})
    sizes = _SIZES | {"num_experts_per_tok": TOP_K}
    if not {"num_experts", "num_local_experts", "moe_num_experts"} & own.keys():
        sizes["n_routed_experts"] = EXPERTS
    if {"moe_k", "moe_topk", "top_k_experts"} & own.keys():
        del sizes["num_experts_per_tok"]
    return sizes | own | changes


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in eval mode; routers, biases and norms are random too."""
    torch.manual_seed(seed)
    made = config(family, **changes)
    built = class_of(made).from_config(made, dtype=torch.float32)
    router = FAMILIES[family].places(made).router_target
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(router):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        for name, tensor in [*built.named_buffers(), *built.named_parameters()]:
            if name.endswith(BIASES):
                tensor.normal_(0, 0.1)
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort(1)[:, : tensor.shape[1]])
    return built.eval()
