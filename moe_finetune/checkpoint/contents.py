"""An opened checkpoint: its folder, config, family and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.io.safetensors_header import Header, TensorInfo
from moe_finetune.models import Family
from moe_finetune.models.structure import name_on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.checkpoint.stored import QuantizedTensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    Attributes:
        config: ``config.json`` as a mapping.
        model_config: transformers' config of the same; a copy of it goes into each model.
        files: header of every weight file, by file name, in the order of the names.
        tensors: every tensor by name, as an unquantized checkpoint has it.
        quantized: reads them where they are stored quantized.
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
        """Number of routed experts of each MoE layer."""
        layers = self.family.moe_layers(self.model_config)
        return dict.fromkeys(layers, self.family.num_experts(self.model_config))

    def name_in_files(self, name: str) -> str:
        """Name in the files of the loaded model's tensor ``name``, or of one that is named so."""
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


def layer_number(name: str, family: Family | None) -> int | None:
    """The decoder layer of a tensor in the files; None outside the decoder layers."""
    stack = "layers." if family is None else family.disk.stack
    head, separator, tail = name.partition(stack)
    layer = tail.partition(".")[0]
    at_start = not head or (family is None and head.endswith("."))
    return int(layer) if separator and at_start and layer.isdigit() else None
