"""A checkpoint folder, known from its headers alone: which tensor lies where, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.families import Family, family_of
from moe_finetune.weights.headers import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder.

    Attributes:
        folder: where it lies.
        config: ``config.json`` as a mapping.
        family: the family of its ``model_type``.
        files: header of every weight file, by file name, in the order of the names.
        tensors: every tensor by name.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    files: dict[str, Header]
    tensors: dict[str, TensorInfo]

    @cached_property
    def experts(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer, counted from the tensor names."""
        return _count_experts(self)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(info.size for info in self.tensors.values())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder of safetensors with its ``config.json``, reading headers only.

    Raises:
        CheckpointError: the folder is missing, half-copied, damaged, or holds no safetensors; the
            message names the file or tensor.
        UnsupportedModelError: no family has its ``model_type``.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    config = read_config(folder)
    family = family_of(config)
    files = {name: read_header(folder / name, CheckpointError) for name in _weight_files(folder)}
    tensors: dict[str, TensorInfo] = {}
    for header in files.values():
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor '{name}' is in both {tensors[name].file.name} and "
                    f"{info.file.name}; remove the file that does not belong to the checkpoint"
                )
            tensors[name] = info
    checkpoint = Checkpoint(folder, config, family, files, tensors)
    _check_index(checkpoint)
    _check_layers(checkpoint)
    return checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of ``folder`` as a mapping, or CheckpointError."""
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder}: this is an adapter, not a checkpoint; give the base's folder here"
            )
        raise CheckpointError(f"{folder}: config.json is missing; this is no checkpoint folder")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping, or CheckpointError with the line."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem.strerror})") from problem
    except ValueError as problem:
        raise CheckpointError(f"{file}: not valid JSON ({problem})") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__} instead of a mapping")
    return value


def _weight_files(folder: Path) -> list[str]:
    """Names of the weight files: those of the index, else the single file, else all shards."""
    partial = sorted(p.name for p in folder.glob("*.incomplete"))
    if partial:
        raise CheckpointError(f"{folder}: {partial[0]} is an unfinished download; finish it first")
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        names = [name for name in names if name != "adapter_model.safetensors"]
    if not names:
        pickles = sorted(
            p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}")
        )
        raise CheckpointError(
            f"{folder}: no safetensors file"
            + (f", only {pickles[0]}; convert it to safetensors first" if pickles else "")
        )
    missing = [name for name in (*names, *_siblings(names)) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {missing[0]} is missing ({len(set(missing))} of {len({*names, *missing})} "
            "weight files); copy the folder again"
        )
    return names


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise CheckpointError(f"{folder / INDEX}: 'weight_map' must map tensor names to file names")
    return weight_map


def _siblings(names: Iterable[str]) -> list[str]:
    """All names that ``model-00002-of-00003.safetensors`` says there must be."""
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    return [
        f"{match['stem']}-{part:05d}-of-{match['parts']}.safetensors"
        for match in found
        for part in range(1, int(match["parts"]) + 1)
    ]


def _check_index(checkpoint: Checkpoint) -> None:
    if not (checkpoint.folder / INDEX).is_file():
        return
    for name, file in _weight_map(checkpoint.folder).items():
        if name not in checkpoint.files[file].tensors:
            raise CheckpointError(
                f"{checkpoint.folder / INDEX}: names tensor '{name}' in {file}, which does not "
                "hold it; the index and the shards are of different checkpoints"
            )


def _check_layers(checkpoint: Checkpoint) -> None:
    found = {
        int(match[1])
        for name in checkpoint.tensors
        if (match := re.match(r"model\.layers\.(\d+)\.", name))
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
    parts = {}
    for part in ("gate", "up", "down"):
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
        for part in ("router", *(["router_bias"] if disk.router_bias else [])):
            if disk.name(part, number) not in checkpoint.tensors:
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor '{disk.name(part, number)}' is missing; "
                    "a shard is missing or the checkpoint is incomplete"
                )
        counts[number] = count
    return counts
