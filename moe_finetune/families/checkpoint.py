"""A checkpoint folder as published: which tensors lie in which file, and whether it is whole.

Only headers are read, and no library but the standard one is needed.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of an existing folder as a mapping.

    Raises:
        CheckpointError: the folder or the file is missing, or the file is not a JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder that holds config.json")
    file = folder / "config.json"
    if not file.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = (
            "it holds a LoRA adapter: give its base model, or merge it first"
            if adapter
            else "give the folder that holds config.json and the safetensors files"
        )
        raise CheckpointError(f"{folder}: no config.json; {hint}")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object from ``file``; raise CheckpointError when it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object; copy it again")
    return value


def read_header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's header: tensor name -> dtype, shape and place.

    Raises:
        CheckpointError: the file is missing, is no safetensors file, or its length is not the one
            that its header says (a copy that was cut short).
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; copy the checkpoint again") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{file} is no whole safetensors file ({error}); copy it again"
        ) from None
    if 8 + length + end != size:
        raise CheckpointError(
            f"{file} has {size:,} bytes and its header says {8 + length + end:,}: "
            "it was cut short or changed, copy it again"
        )
    return header


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map every tensor name to its file, for a sharded, single-file or index-less checkpoint.

    Every file's header and length is checked, and the index, where there is one, must name exactly
    the tensors that the files hold.

    Raises:
        CheckpointError: naming the file or tensor that is missing, damaged or held twice.
    """
    index = folder / INDEX
    files = sorted(folder.glob("*.safetensors"))
    listed: dict[str, str] = {}
    if index.is_file():
        listed = read_json(index).get("weight_map") or {}
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{index} has no weight_map; copy it again")
        for name in listed.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index} names '{name}', which is no file of its folder")
        files = [folder / name for name in sorted(set(listed.values()))]
    if not files:
        pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
        raise CheckpointError(
            f"{folder}: no safetensors files"
            + (f"; {pickled[0]} is a pickle, which is never loaded" if pickled else "")
            + "; get the checkpoint in the safetensors format"
        )
    found: dict[str, Path] = {}
    for file in files:
        for name in read_header(file):
            if name in found:
                raise CheckpointError(f"{file}: tensor '{name}' is also in {found[name].name}")
            found[name] = file
    for name, shard in listed.items():
        if found.get(name) != folder / shard:
            raise CheckpointError(
                f"{index} says that '{name}' is in {shard}, which does not hold it; "
                "copy the checkpoint again"
            )
    return found
