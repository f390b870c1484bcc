"""Dense models that experts are made from: supported types, sizes, and loading.

A Llama or Mistral becomes a Mixtral and a Qwen3 a Qwen3-MoE: the same attention, norms and
feed-forward, so that nothing but the router is new.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.load_model import read_weights
from moe_finetune.checkpoint.open import check_folder
from moe_finetune.errors import UnsupportedModelError
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.models.config_and_tokenizer import local_folder, parse_config
from moe_finetune.models.family_lookup import MOE_OF
from moe_finetune.models.tokenizer import Tokenizer

_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "hidden_act", "attention_dropout", "rope_parameters", "intermediate_size",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class DenseFacts:
    """A dense model's type, and the config values that the MoE inherits.

    ``tied``: the head shares the embedding's tensor. Experts may differ in it, since the MoE stores
    both tensors.
    """

    model_type: str
    values: dict[str, Any]
    dtype: str | None
    tied: bool

    @property
    def target(self) -> str:
        return MOE_OF[self.model_type]


def dense_facts(folder: Path) -> DenseFacts:
    """Read a dense checkpoint's config."""
    config = load_dense_config(folder)
    config_file = folder / "config.json"
    _refuse(config_file, config)
    values = {name: getattr(config, name, None) for name in _SHARED}
    values["num_key_value_heads"] = config.num_key_value_heads or config.num_attention_heads
    values["head_dim"] = values["head_dim"] or config.hidden_size // config.num_attention_heads
    if MOE_OF[config.model_type] == "mixtral":
        values["sliding_window"] = getattr(config, "sliding_window", None)
    else:
        values["attention_bias"] = bool(config.attention_bias)
    dtype = getattr(config, "dtype", None)
    return DenseFacts(
        config.model_type,
        values,
        None if dtype is None else str(dtype).removeprefix("torch."),
        bool(config.tie_word_embeddings),
    )


def _refuse(config_file: Path, config: Any) -> None:
    """Raise UnsupportedModelError for options that change the function and that no MoE supports."""
    if config.model_type != "qwen3":
        for key in ("attention_bias", "mlp_bias"):
            if getattr(config, key, False):
                raise UnsupportedModelError(
                    f"{config_file}: {key} is true, but a Mixtral has no biases; use a model "
                    "without biases"
                )
    if config.model_type == "qwen3" and getattr(config, "use_sliding_window", False):
        raise UnsupportedModelError(
            f"{config_file}: use_sliding_window is true, which differs by layer and is not "
            "supported; set it to false"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModelError(
            f"{config_file}: hidden_act '{config.hidden_act}'; expected 'silu'"
        )


def load_dense_config(folder: Path) -> Any:
    """The transformers config of a supported dense model."""
    read_config(folder)
    config = parse_config(folder)
    model_type = config.model_type  # of the class, which may be another than the file's
    if model_type not in MOE_OF:
        reason = ""
        if model_type == "qwen2":
            reason = " (its attention has biases but no norms, unlike both MoE types)"
        raise UnsupportedModelError(
            f"{folder}: model_type '{model_type}' cannot become a MoE here{reason}; supported: "
            + ", ".join(f"{dense} -> {moe}" for dense, moe in MOE_OF.items())
        )
    return config


def load_dense(path: str | Path, dtype: str = "auto") -> Any:
    """Load a dense causal language model in eval mode, every tensor from the checkpoint."""
    folder = local_folder(path)
    config = load_dense_config(folder)
    check_folder(folder, config)
    return read_weights(folder, config, dtype=dtype)


def new_llama(section: Any, tokenizer: Tokenizer, max_length: int) -> Any:
    """A Llama with random weights, in the sizes of a recipe's ``dense.pretrain``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    head = 64 if section.hidden_size >= 512 else 32
    heads = section.hidden_size // head
    config = LlamaConfig(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=head,
        max_position_embeddings=max(2048, max_length),
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(section.seed)
        return LlamaForCausalLM(config)
