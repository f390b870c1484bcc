"""Check a checkpoint's tensors against its ``config.json``, from headers only.

The expected tensors are those of the model, built on the meta device, under the family's names on
disk.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.contents import Checkpoint, layer_numbers
from moe_finetune.checkpoint.untrained import HEAD, untrained
from moe_finetune.errors import CheckpointError, UnsupportedModelError, did_you_mean
from moe_finetune.io.config_file import UNQUANTIZED
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo
from moe_finetune.models import Family
from moe_finetune.models.structure import (
    Shapes,
    integers_on_disk,
    name_on_disk,
    shapes_on_disk,
)

_known: dict[str, Shapes] = {}


def check_fit(checkpoint: Checkpoint) -> dict[str, str]:
    """Compare the number of layers with the config, then every tensor.

    transformers silently drops the tensors of layers beyond the config's count.

    Returns:
        the tensors that loaders ignore; see :func:`moe_finetune.checkpoint.untrained.untrained`.

    Raises:
        CheckpointError: names config.json, the key and the tensors' value, or the tensor.
    """
    config_file = checkpoint.folder / "config.json"
    config, family = checkpoint.model_config, checkpoint.family
    text = config.get_text_config()
    numbers = layer_numbers(checkpoint.tensors, family)
    later = {n for n, index in numbers.items() if (index or 0) >= text.num_hidden_layers}
    later -= untrained(later, config, family).keys()
    layers = 1 + max((numbers[name] or 0 for name in later), default=text.num_hidden_layers - 1)
    if layers != text.num_hidden_layers:
        raise CheckpointError(
            f"{config_file}: num_hidden_layers is {text.num_hidden_layers}, but the files "
            f"contain {layers} layers; restore the checkpoint's own config.json"
        )
    experts = family.num_experts(config)
    if not 1 <= family.top_k(config) <= experts:
        raise CheckpointError(
            f"{config_file}: num_experts_per_tok is {family.top_k(config)}; expected 1 to {experts}"
        )
    loaded = f"{family.backbone}.embed_tokens.weight"
    name = name_on_disk(checkpoint.config, loaded, family.disk.spelling)
    embedding = checkpoint.tensors.get(name)
    expected = (text.vocab_size, text.hidden_size)
    if embedding is not None and embedding.shape != expected:
        raise CheckpointError(
            f"{config_file}: vocab_size and hidden_size are {expected}, and {name} is "
            f"{embedding.shape}; restore the checkpoint's own config.json"
        )
    return check_tensors(checkpoint.folder, checkpoint.tensors, config, family)


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the orientation of its expert stacks, which the shapes tell.

    Raises:
        CheckpointError: the stacks have different orientations.
    """
    disk = checkpoint.family.disk
    if not disk.either:
        return checkpoint
    needed = needed_tensors(checkpoint.model_config, checkpoint.family)
    examples: dict[bool, str] = {}
    for layer in checkpoint.experts:
        for name in (disk.name("gate_up", layer), disk.name("down", layer)):
            shape = needed.get(name)
            if shape is not None and name in checkpoint.tensors:
                examples[checkpoint.tensors[name].shape == _turned(shape) != shape] = name
    if len(examples) > 1:
        raise CheckpointError(
            f"{checkpoint.folder}: '{examples[True]}' is stored transposed, (experts, in, out), "
            f"and '{examples[False]}' is not; loaders would misread one of them; save the "
            "checkpoint again with one layout"
        )
    turned = replace(disk, transposed=True in examples)
    return replace(checkpoint, family=replace(checkpoint.family, disk=turned))


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1])


def check_unpacked(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse, by tensor names, a quantized checkpoint whose config does not declare it.

    Raises:
        UnsupportedModelError: names the format.
    """
    for name in tensors:
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            method = "GPTQ" if f"{stem}.g_idx" in tensors else "AWQ or GPTQ"
        elif leaf == "scales" and f"{stem}.biases" in tensors:
            method = "MLX"
        else:
            continue
        raise UnsupportedModelError(
            f"{folder}: '{name}' is part of a tensor quantized with {method}, which cannot be "
            f"read; {UNQUANTIZED} (for merge: --base FOLDER)"
        )


def check_tensors(
    folder: Path, tensors: Mapping[str, TensorInfo], config: Any, family: Family | None
) -> dict[str, str]:
    """Check that ``tensors`` are exactly those that the model of ``config`` needs.

    Tensors that transformers or the family declares as ignored are allowed, and returned.

    Args:
        tensors: the files' tensors by name.
        family: gives the names on disk; None for a dense model, whose names do not change.

    Raises:
        CheckpointError: names the tensor that is missing, unexpected, of the wrong shape, or not a
            float.
    """
    needed = needed_tensors(config, family)
    if family is not None and family.disk.either and family.disk.transposed:
        stacks = _stacks(family)
        needed = {n: _turned(shape) if stacks(n) else shape for n, shape in needed.items()}
    unneeded = set(tensors) - set(needed)
    left_out = untrained(sorted(unneeded), config, family)
    extra = sorted(unneeded - left_out.keys())
    for name in sorted(set(needed) - set(tensors)):
        if _tied_head(name, config):
            continue
        hint = did_you_mean(name, extra) if extra else ""
        raise CheckpointError(
            f"{folder}: tensor '{name}' is missing; the checkpoint is incomplete{hint}"
        )
    for name in extra:
        if name.startswith("v_head."):
            raise CheckpointError(
                f"{folder}: '{name}' is the value head of TRL's AutoModelForCausalLMWithValueHead; "
                "the checkpoint next to it is another file: save the model alone, with "
                "model.pretrained_model.save_pretrained(FOLDER)"
            )
        raise CheckpointError(
            f"{folder}: tensor '{name}' in {tensors[name].file.name} does not belong to this "
            f"model ({len(extra)} such tensors); the files and config.json are from different "
            "checkpoints"
        )
    integers = integers_on_disk(config, None if family is None else family.disk.spelling)
    for name, shape in needed.items():
        info = tensors.get(name)
        if info is None:
            continue
        if info.dtype not in (INTEGERS if name in integers else FLOATS):
            kind = "whole numbers" if name in integers else "a float"
            raise CheckpointError(
                f"{info.file}: '{name}' is stored as {info.dtype}, not as {kind}, but "
                "config.json has no quantization; restore the checkpoint's own config.json, or "
                "use an unquantized checkpoint"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: '{name}' has shape {list(info.shape)}, but config.json describes "
                f"{list(shape)}; restore the checkpoint's own files"
            )
    return left_out


def _stacks(family: Family) -> Callable[[str], bool]:
    ends = tuple(f".{part}" for part in (family.disk.gate_up, family.disk.down))
    return lambda name: name.startswith(family.disk.stack) and name.endswith(ends)


def needed_tensors(config: Any, family: Family | None) -> Shapes:
    """Name on disk and shape of every tensor of the model of ``config``."""
    spelling = None if family is None else family.disk.spelling
    key = f"{config.to_json_string(use_diff=False)} {spelling}"
    if key not in _known:
        while len(_known) >= 4:
            _known.pop(next(iter(_known)))
        shapes = shapes_on_disk(config, spelling)
        if family is not None and family.bias_export == "noaux_tc" and _biased(config):
            experts = family.num_experts(config)
            for layer in family.moe_layers(config):
                shapes[f"{family.disk.name('router', layer)[: -len('weight')]}{_BIAS}"] = (experts,)
        _known[key] = shapes
    return _known[key]


_BIAS = "e_score_correction_bias"


def _biased(config: Any) -> bool:
    """Return whether vLLM's class for this config has a bias that transformers' class lacks."""
    return getattr(config, "topk_method", None) == "noaux_tc"


def _tied_head(name: str, config: Any) -> bool:
    return name.endswith(HEAD) and bool(getattr(config, "tie_word_embeddings", False))
