"""State without pickle: tensors as safetensors, everything else as JSON in their files.

``pack`` replaces tensors in dictionaries, lists and tuples with their names; ``unpack`` puts them
back. A checkpoint has such a file of the optimizer, and one of each rank: its random state, and the
rows of one of the run's steps. Any number of ranks can resume: each takes the random state of one
old rank, and accumulates as many micro-batches as keep the rows of a step. The run is then the same
except for random draws while it trains (dropout, jitter) and rounding in the order of sums.
"""

import base64
import binascii
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from moe_finetune.errors import CheckpointError

_TENSOR = "__tensor__"
_TUPLE = "__tuple__"
_ITEMS = "__items__"
TRAINER_FILE = "trainer_state.json"
"""Transformers' own state of a trainer and its callbacks, in every checkpoint."""
FOLDER = "trainer"
"""Folder of a checkpoint for what only training reads."""


# -- tensors --------------------------------------------------------------------------------------


def save_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write ``state``; an empty one writes no file."""
    if state:
        save_file(_storable(state), path)


def to_text(state: dict[str, Tensor]) -> str:
    """``state`` as ASCII, bit for bit, for a file that can store only text."""
    return base64.b64encode(save(_storable(state))).decode("ascii")


def from_text(text: str, where: str) -> dict[str, Tensor]:
    """Read what :func:`to_text` returned; raise CheckpointError naming ``where`` if damaged."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (binascii.Error, SafetensorError, ValueError, TypeError) as problem:
        raise CheckpointError(f"{where}: cannot be read ({problem})") from None


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` on the CPU, without shared memory, as the format requires."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        # 8-bit optimizers share one table among all parameters.
        stored[name] = value.clone() if address in seen else value
        seen.add(address)
    return stored


# -- nested state ---------------------------------------------------------------------------------


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return ``value`` as JSON; its tensors go into ``tensors``, by names that start with
    ``path``.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        items = {k: pack(item, tensors, f"{path}/{k}".lstrip("/")) for k, item in value.items()}
        if all(isinstance(key, str) for key in items):
            return items
        return {_ITEMS: [[key, item] for key, item in items.items()]}
    if isinstance(value, list | tuple):
        parts = [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    raise CheckpointError(
        f"{path}: a {type(value).__name__} cannot be saved without pickle; use an optimizer and "
        "scheduler whose state is numbers and tensors"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that :func:`pack` was called with."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unpack(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {key: unpack(item, tensors) for key, item in value[_ITEMS]}
    return {key: unpack(item, tensors) for key, item in value.items()}


def write_packed(path: Path, packed: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a file with what :func:`pack` returned, and its tensors."""
    save_file(_storable(tensors), path, metadata={"state": json.dumps(packed)})


def read_packed(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Packed state and tensors of such a file; raise CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return json.loads((file.metadata() or {}).get("state", "{}")), tensors
    except (OSError, SafetensorError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None


# -- of each rank ---------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Random states of Python, NumPy and PyTorch in this process, as plain values."""
    kind, keys, *rest_of_numpy = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest_of_numpy),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    random.setstate(state["python"])
    kind, keys, *rest_of_numpy = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest_of_numpy))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def rank_file(rank: int) -> str:
    """The path of a rank's file in a checkpoint."""
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def pack_rank(args: Any, **state: Any) -> bytes:
    """This rank's file."""
    tensors: dict[str, Tensor] = {}
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    written_by = {"world_size": args.world_size, "rows": rows, "random": random_state()}
    packed = pack({**written_by, **state}, tensors)
    return save(_storable(tensors), metadata={"state": json.dumps(packed)})


def check_continues(checkpoint: Path) -> None:
    """Refuse a whole checkpoint that training cannot continue from."""
    if (checkpoint / TRAINER_FILE).is_file() and not any((checkpoint / FOLDER).glob("*")):
        raise CheckpointError(
            f"{checkpoint}: was saved with trainer.save_only_model, without the optimizer, so "
            "--resume cannot continue from it; start a new run, with lora.start: "
            f"{checkpoint} to begin with its adapter"
        )


def read_rank(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The state that ``rank`` resumes from: its own, or with more ranks that of another."""
    check_continues(checkpoint)
    first = unpack(*read_packed(checkpoint / rank_file(0)))
    old = rank % first["world_size"]
    return unpack(*read_packed(checkpoint / rank_file(old))) if old else first


def accumulation(checkpoint: Path, args: Any) -> int:
    """The accumulation that gives steps as many rows as those of ``checkpoint``."""
    first = read_rank(checkpoint, 0)
    world, rows = first["world_size"], first["rows"]
    if world == args.world_size:
        return args.gradient_accumulation_steps
    rows_per_batch = args.train_batch_size * args.world_size
    if rows % rows_per_batch:
        raise CheckpointError(
            f"{checkpoint}: was written by {world} processes whose steps took {rows} rows, and "
            f"{args.world_size} of {args.train_batch_size} rows cannot continue it; resume with "
            f"{world} processes"
        )
    return rows // rows_per_batch
