"""Check a checkpoint's tensors, by their headers, against those that the class of its config needs.

Others are allowed only where loaders ignore them: MTP heads, and what the class itself declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError, did_you_mean
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo
from moe_finetune.models import Family
from moe_finetune.models.class_structure import ignored_names

if TYPE_CHECKING:
    from moe_finetune.checkpoint.tensor_names import Names

RESTORE = "restore the checkpoint's own config.json"
MTP = "the MTP head"
COMPUTED = "buffers that loaders compute"
TIED = "a tied language-model head"
OTHER = "parts that transformers ignores"

_HEAD = "lm_head.weight"
# A buffer that old exports stored and every loader recomputes.
_INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"
# Joins embedding and hidden state; every MTP layer has it and no decoder layer does.
_JOINT = ".eh_proj.weight"
# Config keys for the number of MTP layers.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_hidden_layers")
_NUMBERED = re.compile(r"layers\\\.(\d+)")
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def check_tensors(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    names: Names,
    config: Any,
    family: Family | None = None,
) -> dict[str, str]:
    """Check that ``tensors`` are exactly those that the model of ``config`` needs.

    Returns:
        the tensors that loaders ignore, each with the part it belongs to.
    """
    if family is not None:
        experts, chosen = family.places(config).num_experts, family.top_k(config)
        if not 1 <= chosen <= experts:
            raise CheckpointError(
                f"{folder / 'config.json'}: num_experts_per_tok is {chosen}; expected 1 to "
                f"{experts}"
            )
    needed = names.needed()
    unneeded = {name: names.loaded[name] for name in sorted(tensors.keys() - needed.keys())}
    if getattr(config, "topk_method", None) == "noaux_tc":  # vLLM's class has this bias
        unneeded = {k: v for k, v in unneeded.items() if not k.endswith("e_score_correction_bias")}
    stack = names.stack("model" if family is None else family.places(config).backbone)
    ignored = _ignored(unneeded, config, stack)
    extra = sorted(unneeded.keys() - ignored.keys())
    layers = config.get_text_config().num_hidden_layers
    stored_layers = 1 + max((_layer_of(name, stack) or 0 for name in extra), default=0)
    if stored_layers > layers:  # transformers drops these without a word
        raise CheckpointError(
            f"{folder / 'config.json'}: num_hidden_layers is {layers}, but the files contain "
            f"{stored_layers} layers; {RESTORE}"
        )
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name in sorted(needed.keys() - tensors.keys()):
        if not (tied and name.endswith(_HEAD)):
            raise CheckpointError(
                f"{folder}: tensor '{name}' is missing; the checkpoint is incomplete"
                + (did_you_mean(name, extra) if extra else "; copy the missing shard")
            )
    if extra and extra[0].startswith("v_head."):
        raise CheckpointError(
            f"{folder}: '{extra[0]}' is the value head of TRL's AutoModelForCausalLMWithValueHead; "
            "the checkpoint next to it is another file: save the model alone, with "
            "model.pretrained_model.save_pretrained(FOLDER)"
        )
    if extra and (clash := _two_counts(folder)):
        raise CheckpointError(f"{folder / 'config.json'}: {clash}")
    if extra:
        raise CheckpointError(
            f"{folder}: tensor '{extra[0]}' in {tensors[extra[0]].file.name} does not belong to "
            f"this model ({len(extra)} such tensors); the files and config.json are from different "
            "checkpoints"
        )
    stacks = {t.is_contiguous(): n for n, t in needed.items() if t.ndim == 3 and n in tensors}
    if names.turns and len(stacks) > 1:
        raise CheckpointError(
            f"{folder}: '{stacks[False]}' is stored transposed, (experts, in, out), and "
            f"'{stacks[True]}' is not; loaders would misread one of them; save the checkpoint "
            "again with one layout"
        )
    for name, tensor in needed.items():
        if name in tensors:
            _check_tensor(tensors[name], tuple(tensor.shape), tensor.is_floating_point())
    return ignored


def _two_counts(folder: Path) -> str | None:
    """Says that config.json counts the experts twice; transformers takes one of the keys."""
    config = read_config(folder, quantized=True)
    section = config.get("text_config")
    text = section if isinstance(section, dict) else config
    counts = {key: text[key] for key in _EXPERT_COUNTS if isinstance(text.get(key), int)}
    if len(set(counts.values())) < 2:
        return None
    values = " and ".join(f"{key} {value}" for key, value in counts.items())
    return (
        f"{values} count the experts differently, and transformers takes one of them; keep the one "
        "that the files have, and remove the other"
    )


def _check_tensor(info: TensorInfo, shape: tuple[int, ...], floating: bool) -> None:
    if info.dtype not in (FLOATS if floating else INTEGERS):
        kind = "a float" if floating else "whole numbers"
        raise CheckpointError(
            f"{info.file}: '{info.name}' is stored as {info.dtype}, not as {kind}, but config.json "
            f"has no quantization; {RESTORE}, or use an unquantized checkpoint"
        )
    if info.shape != shape:
        embeds = info.name.endswith(("embed_tokens.weight", _HEAD))
        raise CheckpointError(
            f"{info.file}: '{info.name}' has shape {list(info.shape)}, but config.json describes "
            f"{list(shape)}{' (vocab_size, hidden_size)' if embeds else ''}; {RESTORE} and files"
        )


def _ignored(names: Mapping[str, str], config: Any, stack: str) -> dict[str, str]:
    """The tensors that loaders ignore, each with the part it belongs to.

    ``names``: those that the model does not need, and the name under which each would be loaded;
    ``stack``: how the names of the decoder's layers begin in the files.
    """
    patterns = list(_patterns(config))
    predicting = _predicting_layers(names, config, stack)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    parts = {}
    for name, loaded in names.items():
        layer = _layer_of(name, stack)
        if name.endswith(_INVERSE_FREQUENCIES):
            parts[name] = COMPUTED
        elif tied and name.endswith(_HEAD):
            parts[name] = TIED
        elif layer in predicting:
            parts[name] = MTP
        elif any(pattern.search(name) or pattern.search(loaded) for pattern in patterns):
            parts[name] = MTP if layer is not None or "mtp" in name else OTHER
    return parts


def _layer_of(name: str, stack: str) -> int | None:
    """The decoder layer of a tensor in the files; None outside the decoder layers."""
    number = name.removeprefix(stack).partition(".")[0]
    return int(number) if name.startswith(stack) and number.isdigit() else None


def _patterns(config: Any) -> Iterator[re.Pattern[str]]:
    """What transformers and the config declare, without layers of larger models.

    A class that names a layer by number means the one after the published model's decoder.
    """
    text = config.get_text_config()
    declared = list(ignored_names(config))
    if any(_counts(text)):
        declared.append(r"(^|\.)mtp(_\w+)?\.")
    for pattern in declared:
        layer = _NUMBERED.search(pattern)
        if layer is None or int(layer[1]) >= text.num_hidden_layers:
            yield re.compile(pattern)


def _predicting_layers(names: Iterable[str], config: Any, stack: str) -> set[int]:
    """MTP layers: those after the decoder's last, as in DeepSeek-V3.

    A config that counts them declares them too (MiniMax-M2, whose class declares nothing).
    """
    text = config.get_text_config()
    first = text.num_hidden_layers
    in_class = any(_NUMBERED.search(pattern) for pattern in ignored_names(config))
    allowed = range(first, first + max(*_counts(text), in_class))
    joined = {_layer_of(name, stack) or 0 for name in names if name.endswith(_JOINT)}
    return {layer for layer in joined if layer in allowed}


def _counts(text: Any) -> list[int]:
    counts = (getattr(text, key, None) for key in _COUNTS)
    return [count for count in counts if isinstance(count, int)] or [0]
