"""Open and compare, by headers, dense checkpoints that become experts of one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.io.checkpoint_files import read_headers, tensors_of
from moe_finetune.io.safetensors_header import FLOATS, TensorInfo
from moe_finetune.upcycle.dense_parents import DenseFacts, dense_facts
from moe_finetune.upcycle.frequencies import tokenizer_hash

FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# Buffers in old checkpoints of these models, which transformers computes.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Expert:
    """A dense checkpoint's folder, facts and tensor headers."""

    folder: Path
    facts: DenseFacts
    tensors: dict[str, TensorInfo]


def open_expert(path: str | Path) -> Expert:
    """Read config and headers of a dense checkpoint."""
    folder = Path(path)
    facts = dense_facts(folder)
    tensors = {
        name: info
        for name, info in tensors_of(read_headers(folder)).items()
        if not name.endswith(_COMPUTED)
    }
    if facts.tied and "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    expected = {name for names in tensor_names(facts).values() for name in names}
    for name in sorted(expected - set(tensors)):
        raise CheckpointError(f"{folder}: tensor '{name}' is missing; copy the checkpoint again")
    for name in sorted(set(tensors) - expected):
        raise CheckpointError(
            f"{folder}: tensor '{name}' does not belong to a {facts.model_type} and has no "
            "counterpart in the MoE; remove it"
        )
    for info in tensors.values():
        if info.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"{folder}: '{info.name}' is stored as {info.dtype}; only "
                f"{', '.join(FLOATS)} can be averaged, so give the unquantized checkpoint"
            )
    return Expert(folder, facts, tensors)


def check_alike(experts: Sequence[Expert]) -> None:
    """Raise CheckpointError unless all have the first one's tokenizer, sizes and tensors."""
    first = experts[0]
    tokenizer = tokenizer_hash(first.folder)
    for other in experts[1:]:
        both = f"{other.folder} and {first.folder}"
        if other.facts.model_type != first.facts.model_type:
            raise CheckpointError(
                f"{both}: a {other.facts.model_type} and a {first.facts.model_type} cannot be "
                "experts of one model; give checkpoints trained from the same dense model"
            )
        for key, value in first.facts.values.items():
            if other.facts.values[key] != value:
                raise CheckpointError(
                    f"{both}: {key} is {other.facts.values[key]} and {value}; give checkpoints "
                    "trained from the same dense model"
                )
        if tokenizer_hash(other.folder) != tokenizer:
            raise CheckpointError(
                f"{both}: their tokenizers differ, so equal ids are different text; give "
                "checkpoints trained with one tokenizer"
            )
        for name, info in first.tensors.items():
            tensor = other.tensors[name]
            if (tensor.shape, tensor.dtype) != (info.shape, info.dtype):
                raise CheckpointError(
                    f"{both}: '{name}' is {tensor.dtype} {tensor.shape} and {info.dtype} "
                    f"{info.shape}; give checkpoints of one shape and dtype"
                )


def tensor_names(facts: DenseFacts) -> dict[int, list[str]]:
    """Names of a dense model's tensors by layer; -1 for those outside the layers."""
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{projection}_proj.weight" for projection in "qkvo"]
    if facts.model_type == "qwen3":
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        if facts.values["attention_bias"]:
            parts += [f"self_attn.{projection}_proj.bias" for projection in "qkvo"]
    parts += [f"mlp.{projection}.weight" for projection in FEED_FORWARD.values()]
    names = {
        layer: [f"model.layers.{layer}.{part}" for part in parts]
        for layer in range(facts.values["num_hidden_layers"])
    }
    return {-1: ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"], **names}
