"""An opened checkpoint: its folder, config, family and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.io.safetensors_header import Header, TensorInfo
from moe_finetune.models import Family
from moe_finetune.models.structure import name_on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.checkpoint.names import Names
    from moe_finetune.checkpoint.stored import QuantizedTensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    Attributes:
        config: ``config.json`` as a mapping.
        model_config: the same as transformers' config class; each model gets a copy.
        files: header of every weight file, by file name, sorted.
        tensors: every tensor by name; a quantized one appears with its name and shape as a float
            tensor.
        quantized: reads the tensors of a quantized checkpoint; None for a float one.
        untrained: tensors that no loader reads, such as an MTP head's, and the part that each
            belongs to.
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
        """Number of routed experts of each MoE layer."""
        layers = self.family.moe_layers(self.model_config)
        return dict.fromkeys(layers, self.family.num_experts(self.model_config))

    @cached_property
    def names(self) -> Names:
        """Which tensors of the files make up each tensor of the loaded model."""
        from moe_finetune.checkpoint.names import Names  # needs torch, this file does not

        shapes = {name: info.shape for name, info in self.tensors.items()}
        return Names(self.model_config, shapes)

    def name_in_files(self, name: str) -> str:
        """Name in the files for ``name``, which is a name in the files or in the loaded model."""
        if name in self.tensors:
            return name
        return name_on_disk(self.config, name, self.family.disk.spelling)

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


def layer_numbers(names: Iterable[str], family: Family | None) -> dict[str, int | None]:
    """The decoder layer of each tensor in the files; None outside the decoder layers."""
    stack, anywhere = ("layers.", True) if family is None else (family.disk.stack, False)
    numbers: dict[str, int | None] = {}
    for name in names:
        head, separator, tail = name.partition(stack)
        layer = tail.partition(".")[0]
        at_start = not head or (anywhere and head.endswith("."))
        numbers[name] = int(layer) if separator and at_start and layer.isdigit() else None
    return numbers
