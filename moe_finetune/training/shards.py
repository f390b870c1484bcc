"""Sharded tensors on disk: each rank writes and reads its part.

torch.distributed.checkpoint writes them as safetensors files, whose headers give each part's place
in its tensor: no rank gathers a whole tensor, and nothing is pickled. Any number of ranks, or a
single process without a group, can read them.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from moe_finetune.errors import CheckpointError, ObjectiveError
from moe_finetune.moe.spread import spread_modules
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import Entry, entry_of

FOLDER = "shards"


def is_sharded(model: nn.Module) -> bool:
    """Whether trained parameters are sharded over ranks (FSDP2)."""
    return any(hasattr(p, "device_mesh") for p in model.parameters() if p.requires_grad)


def leave_experts(trainer: Any) -> None:
    """Let FSDP2 shard everything but experts that are already spread over ranks.

    The inner modules are left out, not PEFT's wrappers: FSDP2 would never average the factors of an
    ignored wrapper.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and (spread := spread_modules(trainer.model)):
        plugin.ignored_modules = spread


def check_all_sharded(model: nn.Module) -> None:
    """Refuse trained parameters that FSDP2 does not know, and whose gradients it never averages.

    Every rank would train different ones, without an error. They are in modules that FSDP2 ignores,
    or were added after sharding.

    Raises:
        ObjectiveError: names one of them.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    unknown = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not hasattr(p, "device_mesh")
    ]
    if unknown:
        raise ObjectiveError(
            f"FSDP2 does not shard {len(unknown)} trained tensors, e.g. {unknown[0]}, so each rank "
            "would train its own; add the adapter before sharding, and ignore only the frozen "
            "modules inside PEFT's wrappers"
        )


def write_shards(target: Path, tensors: Mapping[str, Tensor]) -> tuple[Path, dict[str, Entry]]:
    """Write this rank's part of ``tensors`` next to ``target``; every rank must call this.

    Returns the folder, to be moved into the checkpoint by :func:`adopt_shards`, and size and hash
    of every rank's files.

    Raises:
        OSError: on all ranks, when one of them could not write.
    """
    # All ranks know the name, and clear_leftovers removes what a killed run left under it.
    staged = target.parent / f".{target.name}.{FOLDER}.partial-00000000"
    if ranks.rank() == 0:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    ranks.barrier()
    writer = HuggingFaceStorageWriter(str(staged), save_distributed=True)
    problem, entries = "", {}
    try:
        dcp.save(dict(tensors), storage_writer=writer)
        shard_files = staged.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors")
        entries = {f"{FOLDER}/{file.name}": entry_of(file) for file in shard_files}
    except CheckpointException as failed:  # not an Exception; contains all ranks' errors
        problem = str(next(iter(failed.failures.values()))[0])
    except OSError as failed:
        problem = str(failed)
    if ranks.any_rank(bool(problem)):
        raise OSError(problem or "another rank could not write its shard")
    blobs = ranks.gather_bytes(json.dumps(entries).encode())
    return staged, {name: entry for blob in blobs for name, entry in json.loads(blob).items()}


def adopt_shards(staged: Path, entries: Mapping[str, Entry], folder: Path) -> None:
    """Move the files of :func:`write_shards` into an unfinished checkpoint; only on rank 0.

    Raises:
        OSError: another node's files are missing.
    """
    for name in entries:
        if not (staged / Path(name).name).is_file():
            raise OSError(
                f"{name} was written on another node and is not visible here; put the run's "
                "folder on a file system that all nodes share, or set fsdp_state_dict_type: "
                "FULL_STATE_DICT"
            )
    staged.rename(folder / FOLDER)


def stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each unsharded tensor of a checkpoint's shards; empty without shards.

    Raises:
        CheckpointError: a file cannot be read, or parts of a tensor are missing.
    """
    if not (folder / FOLDER).is_dir():
        return {}
    try:
        metadata: Any = HuggingFaceStorageReader(str(folder / FOLDER)).read_metadata()
    except (OSError, SafetensorError, ValueError, KeyError) as problem:
        raise CheckpointError(f"{folder / FOLDER}: cannot be read ({problem})") from None
    for name, tensor in metadata.state_dict_metadata.items():
        stored_numel = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if stored_numel != math.prod(tensor.size):
            raise CheckpointError(f"{folder / FOLDER}: parts of {name} are missing")
    return {n: (t.size, t.properties.dtype) for n, t in metadata.state_dict_metadata.items()}


def read_shards(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets``, however sharded, from a checkpoint's shards; every rank must call this.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    if not targets:
        return
    shapes = stored(folder)
    for name, target in targets.items():
        if name not in shapes:
            raise CheckpointError(
                f"{folder / FOLDER}: {name} is missing; resume with the recipe that wrote it"
            )
        if shapes[name][0] != target.shape:
            raise CheckpointError(
                f"{folder / FOLDER}: {name} has shape {tuple(shapes[name][0])}, but the run's "
                f"has {tuple(target.shape)}; resume with the recipe that wrote it"
            )
    reader = HuggingFaceStorageReader(str(folder / FOLDER))
    try:
        dcp.load(dict(targets), storage_reader=reader, no_dist=not ranks.distributed_run())
    except CheckpointException as problem:
        raise CheckpointError(f"{folder / FOLDER}: cannot be read ({problem})") from None
