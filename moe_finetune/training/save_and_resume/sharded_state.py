"""Sharded tensors on disk: each rank writes and reads its part.

torch.distributed.checkpoint writes them as safetensors files, whose headers give each part's place
in its tensor: no rank gathers a whole tensor, and nothing is pickled. Any number of ranks, or a
single process without a group, can read them.
"""

import json
import math
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
from moe_finetune.moe.large.spread_experts import spread_modules
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.training_state import Entry, entry_of

FOLDER = "shards"
WEIGHTS, MOMENTS = "weights/", "optimizer/state/"
"""Prefixes of the names of tensors in shards: by parameter, and by its index in the optimizer."""


def is_sharded(model: nn.Module) -> bool:
    """Whether trained parameters are sharded over ranks (FSDP2)."""
    return any(hasattr(p, "device_mesh") for p in model.parameters() if p.requires_grad)


def leave_experts(trainer: Any) -> None:
    """Let FSDP2 shard everything but the inner modules of experts that are already spread.

    FSDP2 would never average the factors of an ignored PEFT wrapper.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and (spread := spread_modules(trainer.model)):
        plugin.ignored_modules = spread


def check_all_sharded(model: nn.Module) -> None:
    """Refuse trained parameters that FSDP2 does not know: each rank would train different ones."""
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


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Write this rank's part of ``tensors``; returns the manifest entries of every rank's files."""
    target = folder / FOLDER
    if ranks.rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
    problem, entries = "", {}
    try:
        dcp.save(dict(tensors), storage_writer=writer)
        shard_files = target.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors")
        entries = {f"{FOLDER}/{file.name}": entry_of(file) for file in shard_files}
    except CheckpointException as failed:  # not an Exception; contains all ranks' errors
        problem = str(next(iter(failed.failures.values()))[0])
    except OSError as failed:
        problem = str(failed)
    if ranks.any_rank(bool(problem)):
        raise OSError(problem or "another rank could not write its shard")
    blobs = ranks.gather_bytes(json.dumps(entries).encode())
    return {name: entry for blob in blobs for name, entry in json.loads(blob).items()}


def sharded_moments(
    tensors: Mapping[str, Tensor], optimizer: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split an optimizer's tensors, by names of :func:`pack`: those equal on all ranks, and
    shards.
    """
    shards = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")}
    whole = {name: tensor for name, tensor in tensors.items() if name not in shards}
    if different := [n for n, t in whole.items() if n.startswith(MOMENTS) and t.numel() > 1]:
        raise CheckpointError(
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} keeps a different "
            f"'{different[0].rpartition('/')[2]}' of a tensor on every rank, which cannot be "
            "saved; use trainer.optim: adamw_torch"
        )
    return whole, shards


def read_moments(folder: Path, optimizer: Any) -> dict[str, Tensor]:
    """The shards of :func:`sharded_moments`, each sharded as its parameter is now."""
    parameters = parameters_of(optimizer)
    moments = {}
    for name, (shape, dtype) in stored(folder).items():
        if name.startswith(MOMENTS):
            like_it = parameters[int(name.split("/")[2])]
            if like_it.shape == shape:
                moments[name] = torch.empty_like(like_it, dtype=dtype, requires_grad=False)
            else:
                moments[name] = torch.empty(shape, dtype=dtype)
    read_shards(folder, moments)
    return moments


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Parameters by their index in the optimizer's state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each unsharded tensor of a checkpoint's shards; empty without shards."""
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
    """Fill ``targets``, however sharded, from a checkpoint's shards; every rank must call this."""
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
