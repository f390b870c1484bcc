"""Whether a checkpoint's tensors are those that its ``config.json`` describes; headers only.

What a model needs is asked of the model itself, built on the meta device, and put into the names
that the family has on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.errors import CheckpointError, did_you_mean
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo
from moe_finetune.models import Family, family_of
from moe_finetune.models.structure import integers_on_disk, name_on_disk, shapes_on_disk

Shapes = dict[str, tuple[int, ...]]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = "lm_head.weight"
# A buffer that old exports stored and every loader computes anew.
_COMPUTED = ".rotary_emb.inv_freq"
_known: dict[str, Shapes] = {}


def check_fit(checkpoint: Checkpoint, config: Any) -> None:
    """Compare layers, experts, hidden size and vocabulary with ``config``, then every tensor.

    transformers drops tensors of layers that the config does not count, without an error.

    Raises:
        CheckpointError: names config.json, the key, and what the tensors say; or the tensor.
    """
    place = checkpoint.folder / "config.json"
    family = family_of(checkpoint.config)
    numbers = [int(m.group(1)) for name in checkpoint.tensors if (m := _LAYER.search(name))]
    layers = max(numbers, default=-1) + 1
    if not config.num_hidden_layers <= layers <= config.num_hidden_layers + _predicting(config):
        raise CheckpointError(
            f"{place}: num_hidden_layers is {config.num_hidden_layers}, and the tensors are of "
            f"{layers} layers; restore the checkpoint's own config.json"
        )
    experts = family.num_experts(config)
    for layer in family.moe_layers(config):
        stored = checkpoint.experts.get(layer)
        if stored != experts:
            raise CheckpointError(
                f"{place}: layer {layer} should have {experts} routed experts, and its tensors are "
                f"of {stored or 'none'}; restore the checkpoint's own config.json"
            )
    if not 1 <= family.top_k(config) <= experts:
        raise CheckpointError(
            f"{place}: num_experts_per_tok is {family.top_k(config)}; wanted 1 to {experts}"
        )
    embedding = next(
        (t for name, t in checkpoint.tensors.items() if name.endswith("embed_tokens.weight")), None
    )
    wanted = (config.vocab_size, config.hidden_size)
    if embedding is not None and tuple(embedding.shape) != wanted:
        raise CheckpointError(
            f"{place}: vocab_size and hidden_size are {wanted}, and {embedding.name} is "
            f"{tuple(embedding.shape)}; restore the checkpoint's own config.json"
        )
    check_tensors(checkpoint.folder, checkpoint.tensors, config, family)


def check_tensors(
    folder: Path, tensors: Mapping[str, TensorInfo], config: Any, family: Family | None
) -> None:
    """Compare ``tensors`` with what the model of ``config`` needs: each of them and no other.

    Args:
        folder: for messages.
        tensors: those of the files by name.
        config: transformers' config.
        family: names on disk are this family's; None for a dense model, whose names are the same.

    Raises:
        CheckpointError: names the tensor that is missing, too many, of another shape, or no float.
    """
    needed = _under_names_in(tensors, needed_tensors(config, family), config)
    optional = {_HEAD} if getattr(config, "tie_word_embeddings", False) else set()
    extra = sorted(n for n in set(tensors) - set(needed) if not _left_aside(n, config))
    for name in sorted(set(needed) - set(tensors) - optional):
        hint = did_you_mean(name, extra) if extra else ""
        raise CheckpointError(
            f"{folder}: tensor '{name}' is missing; a shard is missing or the checkpoint is "
            f"incomplete{hint}"
        )
    for name in extra:
        raise CheckpointError(
            f"{folder}: tensor '{name}' in {tensors[name].file.name} is none of this model's "
            f"({len(extra)} such tensors); the files are of another checkpoint or config.json is"
        )
    integers = integers_on_disk(config)
    for name, shape in needed.items():
        info = tensors.get(name)
        if info is None:
            continue
        if info.dtype not in (INTEGERS if name in integers else FLOATS):
            wanted = "whole numbers" if name in integers else "a float"
            raise CheckpointError(
                f"{info.file}: '{name}' is stored as {info.dtype}, not as {wanted}; the checkpoint "
                "is quantised or damaged, use the unquantised one"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: '{name}' has shape {list(info.shape)}, and config.json describes "
                f"{list(shape)}; restore the checkpoint's own files"
            )


def needed_tensors(config: Any, family: Family | None) -> Shapes:
    """Name on disk and shape of every tensor that the model of ``config`` is made of."""
    key = config.to_json_string(use_diff=False)
    if key not in _known:
        while len(_known) >= 4:
            _known.pop(next(iter(_known)))
        shapes = shapes_on_disk(config)
        if family is not None and family.bias_export == "noaux_tc" and _biased(config):
            experts = family.num_experts(config)
            for layer in family.moe_layers(config):
                shapes[f"{family.disk.name('router', layer)[: -len('weight')]}{_BIAS}"] = (experts,)
        _known[key] = shapes
    return _known[key]


def _under_names_in(tensors: Mapping[str, TensorInfo], needed: Shapes, config: Any) -> Shapes:
    """``needed``, with the loaded model's name where the files use that: loaders take both."""
    missing = set(needed) - set(tensors)
    if not missing:
        return needed
    mapping = config.to_dict()
    others = {name_on_disk(mapping, name): name for name in sorted(set(tensors) - set(needed))}
    return {others.get(n, n) if n in missing else n: shape for n, shape in needed.items()}


_BIAS = "e_score_correction_bias"


def _biased(config: Any) -> bool:
    """Whether vLLM's class of this config has a bias that transformers' class knows nothing of."""
    return getattr(config, "topk_method", None) == "noaux_tc"


def places_on_disk(
    state: Shapes, family: Family, config: Any
) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Each tensor of a loaded model with the files' tensors that it is, one below the other."""
    stack = re.compile(rf"model\.layers\.(\d+)\.{re.escape(family.experts_path)}\.(\w+)")
    disk, mapping = family.disk, config.to_dict()
    for name, shape in state.items():
        match = stack.fullmatch(name)
        if match is None or match[2] not in family.expert_parameters:
            yield name, [(name_on_disk(mapping, name), shape)]
            continue
        parts = disk.parts(match[2])
        if disk.fused:
            yield name, [(disk.name(parts[0], int(match[1])), shape)]
            continue
        part_shape = (shape[1] // len(parts), shape[2])
        yield (
            name,
            [
                (disk.name(part, int(match[1]), expert), part_shape)
                for expert in range(shape[0])
                for part in parts
            ],
        )


def _predicting(config: Any) -> int:
    """Layers after the last that predict further tokens, which nothing here uses."""
    return getattr(config, "num_nextn_predict_layers", None) or 0


def _left_aside(name: str, config: Any) -> bool:
    """Whether loaders leave the tensor aside: computed anew, a tied head, a predicting layer."""
    layer = _LAYER.search(name)
    return (
        name.endswith(_COMPUTED)
        or (name == _HEAD and getattr(config, "tie_word_embeddings", False))
        or (layer is not None and int(layer[1]) >= config.num_hidden_layers)
    )
