"""Tiny random dense checkpoints, no two dimensions equal, and texts of a few kinds."""

import json
import random
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support import tiny

SIZES = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 112,
    "max_position_embeddings": 640,
    "rms_norm_eps": 3e-6,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": ROPE}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_biased": (Qwen3Config, Qwen3ForCausalLM, {"attention_bias": True}),
}


def model(kind: str, seed: int = 0, **changes):
    """A dense model in eval mode; norms and biases are random too."""
    config, architecture, own = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = architecture(config(**{**SIZES, **own, **changes}))
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.3)
    return built.eval()


def save(kind: str, folder: Path, seed: int = 0, **changes) -> Path:
    """Write a checkpoint with the tiny tokenizer and return its folder."""
    model(kind, seed, **changes).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def write_categories(folder: Path, count: int, texts: int = 20) -> dict[str, str]:
    """``count`` files of texts, each kind with an alphabet of its own; name -> file."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(count)
    files = {}
    for number in range(count):
        letters = "abcdefghijklmnopqrstuvwxyz"[3 * (number // 2) : 3 * (number // 2) + 4] + " "
        rows = [
            {"text": "".join(generator.choices(letters, k=60 + 7 * i % 50))} for i in range(texts)
        ]
        path = folder / f"kind{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[f"kind{number}"] = str(path)
    return files
