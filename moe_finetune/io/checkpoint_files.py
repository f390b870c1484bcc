"""A checkpoint folder as published: which file contains each tensor, and whether it is complete.

Only headers are read, and only the standard library is needed.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.check_config import SAME_CLASS, check_config
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
PRUNED = "pruned.json"
COPY_AGAIN = "copy or download this file again"
_PICKLED = ("*.bin", "*.pt", "*.pth")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")


def read_config(folder: Path, quantized: bool = False) -> dict[str, Any]:
    """Read ``config.json`` of a folder; with ``quantized`` also of a quantized checkpoint.

    Its ``model_type`` is that of transformers' class; see :data:`SAME_CLASS`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the one that contains config.json")
    file = folder / "config.json"
    if not file.is_file():
        hint = "give the folder that contains config.json and the safetensors files"
        if (folder / "adapter_config.json").is_file():
            hint = "this is an adapter; give its base model's folder, or merge it first"
        elif inside := [
            *folder.glob("merged/config.json"),
            *folder.glob("snapshots/*/config.json"),
        ]:
            hint += f"; did you mean {inside[-1].parent}?"
        raise CheckpointError(f"{folder}: no config.json; {hint}")
    # Mamba's time steps are published without an upper limit.
    config = read_object(file, CheckpointError, COPY_AGAIN, finite=False)
    check_config(config, file, quantized)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in SAME_CLASS:
        config["model_type"] = SAME_CLASS[model_type]
    return config


def read_generation(folder: Path) -> dict[str, Any]:
    """Read a folder's ``generation_config.json``, with whole numbers as token ids; {} without."""
    file = folder / GENERATION
    if not file.is_file():
        return {}
    settings = read_object(file, CheckpointError, COPY_AGAIN)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = settings.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise CheckpointError(
                f"{file}: {key} is {json.dumps(value)}, not a token id; write whole numbers"
            )
    return settings


def read_headers(folder: Path) -> dict[str, Header]:
    """Header of every weight file by file name, of a sharded, single or index-less checkpoint.

    Every file's header and length is checked, and the index, where there is one, must name the
    file that contains each tensor.
    """
    listed = _weight_map(folder)
    files = {name: read_header(folder / name, CheckpointError) for name in _names(folder, listed)}
    tensors = tensors_of(files, listed)
    absent = [n for n, at in listed.items() if n not in tensors or tensors[n].file.name != at]
    if absent:
        name = absent[0]
        raise CheckpointError(
            f"{folder / INDEX}: lists tensor '{name}' in {listed[name]}, which does not contain it "
            f"({len(absent)} such entries). If the published index has the entry too, remove it "
            "from weight_map; else the index and the shards are from different checkpoints: copy "
            "the checkpoint again"
        )
    return files


def tensors_of(
    files: dict[str, Header], listed: Mapping[str, str] | None = None
) -> dict[str, TensorInfo]:
    """Every tensor of the files by name; raise CheckpointError if one is in two files.

    ``listed``: the file of each tensor by the index, for the message.
    """
    tensors: dict[str, TensorInfo] = {}
    for header in files.values():
        for name, info in header.tensors.items():
            if name in tensors:
                one, other = tensors[name].file.name, info.file.name
                indexed = (listed or {}).get(name)
                raise CheckpointError(
                    f"{info.file.parent}: tensor '{name}' is in both {one} and {other}"
                    + (f", of which {INDEX} names {indexed}" if indexed else "")
                    + ", and programs differ in which they read. Do not remove a file that has "
                    "other tensors: write one of them again without this tensor, or download the "
                    "checkpoint again"
                )
            tensors[name] = info
    return tensors


def index_text(tensors: Iterable[TensorInfo]) -> str:
    """The content of an index: the name of the file that contains each of ``tensors``."""
    infos = sorted(tensors, key=lambda info: info.name)
    index = {
        "metadata": {"total_size": sum(info.size for info in infos)},
        "weight_map": {info.name: info.file.name for info in infos},
    }
    return json.dumps(index, indent=2) + "\n"


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, of the index; empty without one."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    index = read_object(file, CheckpointError, COPY_AGAIN)
    listed, metadata = index.get("weight_map"), index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError(f"{file}: metadata is not an object; {COPY_AGAIN}")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{file}: has no weight_map; {COPY_AGAIN}")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{file}: lists '{name}', which is not a file in its folder")
    return listed


def _names(folder: Path, listed: dict[str, str]) -> list[str]:
    """Names of the weight files: from the index, else the single file, else all shards."""
    partial = sorted(p.name for p in folder.glob("*.incomplete"))
    if partial:
        raise CheckpointError(
            f"{folder}: {partial[0]} is an unfinished download; finish the download first"
        )
    if listed:
        names = sorted(set(listed.values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        names = [name for name in names if name != "adapter_model.safetensors"]
    if not names:
        pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
        raise CheckpointError(
            f"{folder}: no safetensors files"
            + (f"; {pickled[0]} is a pickle, which is never loaded" if pickled else "")
            + "; convert it to safetensors, or download the checkpoint in that format"
        )
    # The index is complete; some checkpoints are published without the last shards.
    expected = names if listed else [*names, *_siblings(names)]
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} is missing; copy the checkpoint again "
            f"({len(set(missing))} of {len({*names, *missing})} weight files are missing)"
        )
    return names


def _siblings(names: Iterable[str]) -> list[str]:
    """All shard names that a name such as ``model-00002-of-00003.safetensors`` implies."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    return [
        f"{match['stem']}-{part:05d}-of-{match['parts']}.safetensors"
        for match in matches
        for part in range(1, int(match["parts"]) + 1)
    ]
