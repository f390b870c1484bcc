"""Open a checkpoint folder and check its tensors against its ``config.json``, by the headers.

Tensors that no loader reads, such as an MTP head, are kept apart; every export copies their bytes.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.check_tensors import MTP, OTHER, check_tensors
from moe_finetune.checkpoint.unreadable_formats import check_readable
from moe_finetune.errors import CheckpointError
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
from moe_finetune.io.safetensors_header import Header, TensorInfo, read_header
from moe_finetune.models import Family, check_supported, family_of, find_family
from moe_finetune.models.class_structure import part_of
from moe_finetune.models.module_places import Places

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.checkpoint.dequantized_tensors import QuantizedTensors
    from moe_finetune.checkpoint.tensor_names import Names

log = logging.getLogger(__name__)
ADAPTER_CONFIG = "adapter_config.json"
_reported: set[Path] = set()


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
