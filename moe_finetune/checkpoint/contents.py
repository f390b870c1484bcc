"""An opened checkpoint: its folder, config, family and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.io.safetensors_header import Header, TensorInfo
from moe_finetune.models import Family

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
        names: which tensors of the files make up each tensor of the loaded model.
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
    names: Names = field(repr=False)
    quantized: QuantizedTensors | None = None
    untrained: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def experts(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer."""
        layers = self.family.moe_layers(self.model_config)
        return dict.fromkeys(layers, self.family.num_experts(self.model_config))

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
