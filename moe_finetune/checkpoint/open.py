"""Open a checkpoint folder and check its tensors against its ``config.json``, by the headers.

The tensors are those that transformers' class needs. Others are allowed only where loaders ignore
them: MTP heads, and what the class itself declares. Every export copies their bytes.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.unreadable_formats import check_readable
from moe_finetune.errors import CheckpointError, did_you_mean
from moe_finetune.io.check_config import QUANTIZATION
from moe_finetune.io.checkpoint_files import (
    GENERATION,
    INDEX,
    SINGLE,
    read_config,
    read_generation,
    read_headers,
    tensors_of,
)
from moe_finetune.io.counted import counted
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, Header, TensorInfo, read_header
from moe_finetune.models import Family, check_supported, family_of, find_family
from moe_finetune.models.class_structure import ignored_names, part_of
from moe_finetune.models.module_places import Places

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.checkpoint.dequantized_tensors import QuantizedTensors
    from moe_finetune.checkpoint.tensor_names import Names

log = logging.getLogger(__name__)
ADAPTER_CONFIG = "adapter_config.json"
_reported: set[Path] = set()
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    Attributes:
        model_config: transformers' config class; each model gets a copy.
        tensors: every tensor by name; a quantized one as a float tensor of its shape.
        names: which tensors of the files make up each tensor of the loaded model.
        quantized: reads the tensors of a quantized checkpoint; None for a float one.
        untrained: tensors that no loader reads, and the part that each belongs to.
    """

    folder: Path
    config: dict[str, Any]
    model_config: PreTrainedConfig
    family: Family
    files: dict[str, Header]
    tensors: dict[str, TensorInfo]
    names: Names = field(repr=False)
    quantized: QuantizedTensors | None = None
    untrained: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def places(self) -> Places:
        """Where the class has its experts, router and attention."""
        return self.family.places(self.model_config)

    @cached_property
    def experts(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer."""
        return dict.fromkeys(self.places.moe_layers, self.places.num_experts)

    def parts_left_out(self) -> dict[str, tuple[int, int]]:
        """Number of tensors and bytes of each part that no loader reads."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, part in self.untrained.items():
            stored = [self.tensors[name]]
            if self.quantized is not None:
                stored = self.quantized.stored(name)
            count, size = sizes.get(part, (0, 0))
            sizes[part] = count + len(stored), size + sum(info.size for info in stored)
        return sizes

    @property
    def size(self) -> int:
        return sum(header.data_bytes for header in self.files.values())


def open_checkpoint(
    path: str | Path | Checkpoint, values: bool = False, stored: bool = False
) -> Checkpoint:
    """Open and check a folder of safetensors with its ``config.json``, as every command does.

    Only headers are read unless ``values`` is set: then NaN and infinity are refused. ``stored``:
    also accept a quantized checkpoint.
    """
    from moe_finetune.checkpoint.tensor_names import Names  # needs torch, this file does not
    from moe_finetune.models.config_and_tokenizer import parse_config

    if isinstance(path, Checkpoint):
        if path.quantized is not None and not stored:
            read_config(path.folder)  # which refuses it
        return path
    folder = Path(path)
    config = read_config(folder, quantized=stored)
    form = None
    if config.get(QUANTIZATION) is not None:
        from moe_finetune.quantization.formats import format_of

        form = format_of(config, folder / "config.json")
    config.pop(QUANTIZATION, None)
    family = family_of(config, folder)
    files = read_headers(folder)
    check_only_weights(folder, files)
    tensors, quantized = tensors_of(files), None
    check_readable(folder, tensors, form)
    if form is not None:
        from moe_finetune.checkpoint.dequantized_tensors import QuantizedTensors

        quantized = QuantizedTensors(tensors, form)
        tensors = quantized.tensors
    parsed = parse_config(folder)
    # A bias exported for vLLM's class is valid, although transformers cannot run it.
    if not (family.bias_export == "noaux_tc" and config.get("topk_method") == "noaux_tc"):
        check_supported(parsed, family)
    names = Names(parsed, {name: info.shape for name, info in tensors.items()})
    untrained = check_tensors(folder, tensors, names, parsed, family)
    if values:
        _check_values(tensors_of(files))
    return Checkpoint(
        folder=folder,
        config=config,
        model_config=parsed,
        family=family,
        files=files,
        tensors=tensors,
        names=names,
        quantized=quantized,
        untrained=untrained,
    )


def check_only_weights(folder: Path, files: Mapping[str, Header]) -> None:
    """Refuse a single weight file that contradicts the shards, and settings of generation that
    nothing can read; report an adapter left next to the weights.
    """
    read_generation(folder)
    if (folder / INDEX).is_file() and SINGLE not in files and (folder / SINGLE).is_file():
        from moe_finetune.checkpoint.weight_files import fingerprint

        single = read_header(folder / SINGLE, CheckpointError).tensors.values()
        if fingerprint(single) != fingerprint(tensors_of(dict(files)).values()):
            raise CheckpointError(
                f"{folder}: {SINGLE} has other weights than the shards that {INDEX} lists, and "
                "programs differ in which they read; remove the one that does not belong"
            )
    if (folder / ADAPTER_CONFIG).is_file() and folder not in _reported:
        _reported.add(folder)
        log.warning(
            "%s: %s is not applied, although it lies with the weights; move it into its own "
            "folder, to merge it or to continue it with lora.start",
            folder,
            ADAPTER_CONFIG,
        )


@contextmanager
def only_weights(folder: Path) -> Iterator[Path]:
    """``folder`` for ``from_pretrained``, which would also apply an adapter and prefer one file.

    Where it could, a temporary folder of links to the weights of :func:`open_checkpoint`.
    """
    ambiguous = (folder / INDEX).is_file() and (folder / SINGLE).is_file()
    if not ambiguous and not (folder / ADAPTER_CONFIG).is_file():
        yield folder
        return
    names = [*read_headers(folder), INDEX, "config.json", GENERATION]
    with tempfile.TemporaryDirectory(prefix="moe-finetune-") as view:
        for name in names:
            if (folder / name).is_file():
                (Path(view) / name).symlink_to((folder / name).resolve())
        yield Path(view)


def check_folder(folder: Path, config: Any, values: bool = True) -> None:
    """Check tensors and, with ``values``, their values before weights are loaded, also of dense
    models.
    """
    from moe_finetune.checkpoint.tensor_names import Names

    if find_family(config.model_type, part_of(config)) is not None:
        open_checkpoint(folder, values)
        return
    files = read_headers(folder)
    check_only_weights(folder, files)
    tensors = tensors_of(files)
    check_readable(folder, tensors)
    names = Names(config, {name: info.shape for name, info in tensors.items()})
    check_tensors(folder, tensors, names, config)
    if values:
        _check_values(tensors)


def _check_values(tensors: Mapping[str, TensorInfo]) -> None:
    from moe_finetune.checkpoint.weight_files import check_values

    check_values(tensors.values(), CheckpointError)


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


def stale_head(checkpoint: Checkpoint, carried: bool = True) -> list[str]:
    """Notes on stored parts that no loader reads: a head that does not follow the layers that it
    reads, and what a whole model is saved without.

    Args:
        carried: whether what is written has the head; a model that trains in full is saved without.
    """
    parts = checkpoint.parts_left_out()
    heads, others = parts.get(MTP, (0, 0))[0], parts.get(OTHER, (0, 0))[0]
    if not carried:
        without = "a model that trains without an adapter is saved without"
        head_note = (
            f"{MTP} ({counted(heads, 'tensor')}) is not in merged/: {without} it, so speculative "
            "decoding with it is not possible"
        )
        other_note = f"{others} tensors of {OTHER} are not in merged/: {without} them"
        return [*([head_note] if heads else []), *([other_note] if others else [])]
    if not heads:
        return []
    return [
        f"{MTP} ({counted(heads, 'tensor')}) is copied unchanged: it does not train with the "
        "layers that it reads, so speculative decoding may accept fewer tokens; the output stays "
        "the same"
    ]
