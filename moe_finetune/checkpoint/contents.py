"""What a checkpoint folder holds: config, family, headers, and experts counted by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.safetensors_header import Header, TensorInfo
from moe_finetune.models import Family
from moe_finetune.models.composite import language_keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.checkpoint.stored import QuantizedTensors


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder.

    Attributes:
        config: ``config.json`` as a mapping.
        model_config: transformers' config of the same; a copy of it goes into each model.
        files: header of every weight file, by file name, in the order of the names.
        tensors: every tensor by name, as an unquantised checkpoint has it.
        quantized: reads them where they are stored quantised.
        untrained: tensors that no loader reads, such as an MTP head's, and what each is a part of.
    """

    folder: Path
    config: dict[str, Any]
    model_config: PreTrainedConfig
    family: Family
    files: dict[str, Header]
    tensors: dict[str, TensorInfo]
    quantized: QuantizedTensors | None = None
    untrained: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def experts(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer, counted from the tensor names."""
        return _count_experts(self)

    def changed(self, **fields: Any) -> Checkpoint:
        """This checkpoint with other ``fields``, none of which changes the number of experts."""
        other = replace(self, **fields)
        other.__dict__["experts"] = self.experts  # it takes seconds to count thousands of them
        return other

    def parts_left_out(self) -> dict[str, tuple[int, int]]:
        """Tensors in the files and their bytes of each part that no loader reads."""
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


def _decoder_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors of the files outside of an MTP head, whose layers may have experts too."""
    layers = language_keys(checkpoint.config).get("num_hidden_layers")
    for name, info in checkpoint.tensors.items():
        layer = layer_number(name, checkpoint.family)
        later = isinstance(layers, int) and layer is not None and layer >= layers
        if not later and name not in checkpoint.untrained:
            yield name, info


def layer_number(name: str, family: Family | None) -> int | None:
    """The decoder layer that a tensor of the files is of; None outside of them."""
    stack = "layers." if family is None else family.disk.stack
    head, separator, tail = name.partition(stack)
    layer = tail.partition(".")[0]
    at_start = not head or (family is None and head.endswith("."))
    return int(layer) if separator and at_start and layer.isdigit() else None


def _count_experts(checkpoint: Checkpoint) -> dict[int, int]:
    disk = checkpoint.family.disk
    if disk.fused:
        return _count_stacked(checkpoint)
    parts = {}
    for part in [part for part in ("gate", "up", "down") if getattr(disk, part) is not None]:
        literal = re.escape(f"{disk.block}.{getattr(disk, part)}")
        pattern = literal.replace(r"\{layer\}", r"(\d+)").replace(r"\{expert\}", r"(\d+)")
        parts[part] = re.compile(pattern)
    seen: dict[int, dict[str, set[int]]] = {}
    for name, _ in _decoder_tensors(checkpoint):
        for part, regex in parts.items():
            if match := regex.fullmatch(name):
                ids_of_part = seen.setdefault(int(match[1]), {part: set() for part in parts})
                ids_of_part[part].add(int(match[2]))
    counts = {}
    for layer, ids_of_part in sorted(seen.items()):
        count = max(max(ids, default=0) for ids in ids_of_part.values()) + 1
        for part, ids in ids_of_part.items():
            for expert in sorted(set(range(count)) - ids):
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor '{disk.name(part, layer, expert)}' is missing; "
                    "a shard is missing or the checkpoint is incomplete"
                )
        _check_present(checkpoint, layer, ())
        counts[layer] = count
    return counts


def _count_stacked(checkpoint: Checkpoint) -> dict[int, int]:
    """Experts of each layer where a tensor holds all of them: its first dimension."""
    disk = checkpoint.family.disk
    names = [re.escape(f"{disk.block}.{part}") for part in (disk.gate_up, disk.down)]
    regex = re.compile("|".join(name.replace(r"\{layer\}", r"(\d+)") for name in names))
    counts: dict[int, int] = {}
    for name, info in _decoder_tensors(checkpoint):
        if match := regex.fullmatch(name):
            counts.setdefault(int(match[1] or match[2]), info.shape[0] if info.shape else 0)
    for layer in counts:
        _check_present(checkpoint, layer, ("gate_up", "down"))
    return dict(sorted(counts.items()))


def _check_present(checkpoint: Checkpoint, layer: int, parts: tuple[str, ...]) -> None:
    disk = checkpoint.family.disk
    for part in ("router", *parts):
        if disk.name(part, layer) not in checkpoint.tensors:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{disk.name(part, layer)}' is missing; "
                "a shard is missing or the checkpoint is incomplete"
            )
