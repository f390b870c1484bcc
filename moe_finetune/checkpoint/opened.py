"""A checkpoint folder, known from its headers alone: which tensor lies where, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.stored import QuantizedTensors, format_of
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import read_config, read_headers, tensors_of
from moe_finetune.io.config_file import QUANTIZATION
from moe_finetune.io.safetensors_header import Header, TensorInfo
from moe_finetune.models import Family, family_of, find_family


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder.

    Attributes:
        folder: where it lies.
        config: ``config.json`` as a mapping.
        family: the family of its ``model_type``.
        files: header of every weight file, by file name, in the order of the names.
        tensors: every tensor by name, as an unquantised checkpoint has it.
        quantized: reads them where they are stored quantised.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    files: dict[str, Header]
    tensors: dict[str, TensorInfo]
    quantized: QuantizedTensors | None = None

    @cached_property
    def experts(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer, counted from the tensor names."""
        return _count_experts(self)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(info.size for header in self.files.values() for info in header.tensors.values())


def open_checkpoint(path: str | Path, values: bool = False, stored: bool = False) -> Checkpoint:
    """Open a folder of safetensors with its ``config.json``: the gate that every verb passes.

    Its tensors are all that the model needs and no other, with the shapes that the config gives
    and of float dtypes.

    Args:
        path: the folder.
        values: also read every tensor, at the speed of the disk, and refuse NaN and infinity;
            otherwise headers alone are read, whatever the checkpoint's size.
        stored: also take a checkpoint that is stored quantised, for readers of ``quantized``.

    Raises:
        CheckpointError: the folder is missing, half-copied, damaged, or holds no safetensors, or
            it does not fit its config; the message names the file or tensor.
        UnsupportedModelError: no family has its ``model_type`` with these options.
    """
    from moe_finetune.checkpoint.fit import check_fit
    from moe_finetune.models.loading import parse_config

    folder = Path(path)
    config = read_config(folder, quantized=stored)
    form = format_of(config, folder / "config.json")
    config.pop(QUANTIZATION, None)
    family = family_of(config)
    files = read_headers(folder)
    in_files = tensors_of(files)
    quantized = QuantizedTensors(in_files, form) if form is not None else None
    tensors = in_files if quantized is None else quantized.tensors
    checkpoint = Checkpoint(folder, config, family, files, tensors, quantized)
    _check_layers(checkpoint)
    parsed = parse_config(folder)
    # A bias exported for vLLM's class is a checkpoint, though one that transformers cannot run.
    if not (family.bias_export == "noaux_tc" and config.get("topk_method") == "noaux_tc"):
        family_of(parsed)
    check_fit(checkpoint, parsed)
    if values:
        _check_values(in_files)
    return checkpoint


def check_folder(folder: Path, config: Any) -> None:
    """The gate before weights are loaded, for dense models too: tensors and their values.

    Raises:
        CheckpointError, UnsupportedModelError: see :func:`open_checkpoint`.
    """
    from moe_finetune.checkpoint.fit import check_tensors

    if find_family(config.model_type) is not None:
        open_checkpoint(folder, values=True)
        return
    tensors = tensors_of(read_headers(folder))
    check_tensors(folder, tensors, config, None)
    _check_values(tensors)


def _check_values(tensors: dict[str, TensorInfo]) -> None:
    from moe_finetune.checkpoint.values import check_values

    check_values(tensors.values(), CheckpointError, "copy or download the checkpoint again")


def _check_layers(checkpoint: Checkpoint) -> None:
    found = {
        int(match[1])
        for name in checkpoint.tensors
        if (match := re.match(r"(?:model\.|backbone\.)?layers\.(\d+)\.", name))
    }
    wanted = checkpoint.config.get("num_hidden_layers")
    missing = sorted(set(range(wanted)) - found) if isinstance(wanted, int) else []
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: no tensor of layer {missing[0]}, config.json says "
            f"num_hidden_layers {wanted}; a shard is missing"
        )
    _ = checkpoint.experts


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
    for name in checkpoint.tensors:
        for part, regex in parts.items():
            if match := regex.fullmatch(name):
                layer = seen.setdefault(int(match[1]), {part: set() for part in parts})
                layer[part].add(int(match[2]))
    counts = {}
    for number, layer in sorted(seen.items()):
        count = max(max(ids, default=0) for ids in layer.values()) + 1
        for part, ids in layer.items():
            for expert in sorted(set(range(count)) - ids):
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor '{disk.name(part, number, expert)}' is missing; "
                    "a shard is missing or the checkpoint is incomplete"
                )
        _check_present(checkpoint, number, ())
        counts[number] = count
    return counts


def _count_stacked(checkpoint: Checkpoint) -> dict[int, int]:
    """Experts of each layer where a tensor holds all of them: its first dimension."""
    disk = checkpoint.family.disk
    names = [re.escape(f"{disk.block}.{part}") for part in (disk.gate_up, disk.down)]
    regex = re.compile("|".join(name.replace(r"\{layer\}", r"(\d+)") for name in names))
    counts: dict[int, int] = {}
    for name, info in checkpoint.tensors.items():
        if match := regex.fullmatch(name):
            counts.setdefault(int(match[1] or match[2]), info.shape[0] if info.shape else 0)
    for number in counts:
        _check_present(checkpoint, number, ("gate_up", "down"))
    return dict(sorted(counts.items()))


def _check_present(checkpoint: Checkpoint, layer: int, parts: tuple[str, ...]) -> None:
    disk = checkpoint.family.disk
    for part in ("router", *parts):
        if disk.name(part, layer) not in checkpoint.tensors:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{disk.name(part, layer)}' is missing; "
                "a shard is missing or the checkpoint is incomplete"
            )
