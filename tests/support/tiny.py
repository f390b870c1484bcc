"""Tiny random checkpoints of every family, with the real names and layouts.

No two dimensions are equal, so a transposed or permuted tensor cannot pass; head sizes are ones
that vLLM's kernels have. The tokenizer is byte-level with a chat template, so any text encodes.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.models import FAMILIES
from moe_finetune.models.deepseek_moe import register

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 400
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "intermediate_size": 112,
    "moe_intermediate_size": 48,
    "n_routed_experts": 12,
    "n_shared_experts": 3,
    "first_k_dense_replace": 1,
}
_MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 112,
        "moe_intermediate_size": 48,
        "num_experts": 12,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
    },
    "deepseek_v2": _DEEPSEEK
    | _MLA
    | {
        "max_position_embeddings": 40 * 64,
        "rope_parameters": _YARN,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _DEEPSEEK
    | _MLA
    | {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "deepseek_moe": _DEEPSEEK
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "norm_topk_prob": False},
    "olmoe": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_experts": 12,
        "norm_topk_prob": False,
    },
    "mixtral": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 48,
        "num_local_experts": 12,
        "sliding_window": None,
    },
}
FAMILY_NAMES = tuple(_CONFIGS)


def config(family: str) -> Any:
    """A tiny config of ``family`` that keeps every fact of the real one but its sizes."""
    if family == "deepseek_moe":
        register()
    kind = CONFIG_MAPPING[FAMILIES[family].model_type]
    return kind(**copy.deepcopy(_COMMON | _CONFIGS[family]))


def model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A tiny random model in eval mode; router biases and norms are random too."""
    cfg = config(family)
    for key, value in changes.items():
        setattr(cfg, key, value)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        built = AutoModelForCausalLM.from_config(cfg, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("gate.weight"):
                    parameter.normal_(0, 0.3)
            for name, buffer in built.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.1)
    finally:
        torch.set_rng_state(generator_state)
    return built.to(dtype).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: 256 bytes and the special tokens, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(family: str, folder: Path, seed: int = 0, **changes) -> Path:
    """Write a tiny checkpoint (weights, config, tokenizer) and return its folder."""
    built = model(family, seed, **changes)
    built.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def batch(rows: int = 3, length: int = 19, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids with right padding of unequal length, mask and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 260, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, length - 2 * row :] = 0
    ids = ids.masked_fill(mask == 0, 3)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }
