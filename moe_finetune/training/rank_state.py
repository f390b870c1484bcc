"""State that differs between ranks, one file per rank: random state and unlogged sums.

A different number of ranks can resume from them: each takes the random state of one old rank, means
are averaged, and rank 0 takes the sums. The run is then the same except for random draws while it
trains (dropout, jitter, completions), rollouts in use, which are sampled again, and rounding in the
order of sums.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moe_finetune.errors import CheckpointError
from moe_finetune.training.state import pack, unpack


def pack_rank(state: dict[str, Any]) -> bytes:
    """Serialize one rank's file."""
    tensors: dict[str, Tensor] = {}
    packed = pack(state, tensors, "")
    cpu_tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return save(cpu_tensors, metadata={"state": json.dumps(packed)})


def rank_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def read_rank(checkpoint: Path, rank: int, world: int, callbacks: list[Any]) -> dict[str, Any]:
    """Return the state that ``rank`` of ``world`` resumes from.

    Args:
        callbacks: those with a state per rank, in the file's order.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first = _read_state(checkpoint / rank_file(0))
    if first["world_size"] == world:
        return first if rank == 0 else _read_state(checkpoint / rank_file(rank))
    states = [
        first,
        *(_read_state(checkpoint / rank_file(n)) for n in range(1, first["world_size"])),
    ]
    # Random numbers, metrics and the like are those of one old rank; what is summed or averaged
    # over ranks is put together from all of them, so that no token counts twice or never.
    rank_values = states[rank % len(states)]
    return {
        **rank_values,
        "loss": torch.stack([state["loss"] for state in states]).mean(0),
        "rollouts": None,
        "statistics": [
            callback.share_rank_states([state["statistics"][index] for state in states], rank)
            for index, callback in enumerate(callbacks)
        ],
    }


def written_by(checkpoint: Path) -> tuple[int, int]:
    """Number of processes that wrote a checkpoint, and rows of one of their steps.

    Raises:
        CheckpointError: the file is damaged, or of a version that did not write these.
    """
    first = _read_state(checkpoint / rank_file(0))
    return first["world_size"], first["rows"]


def read_tensors(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file; CheckpointError if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem})") from None


def _read_state(file: Path) -> dict[str, Any]:
    metadata, tensors = read_tensors(file)
    state = unpack(json.loads(metadata.get("state", "{}")), tensors)
    if missing := sorted({"world_size", "rows"} - state.keys()):
        raise CheckpointError(
            f"{file}: has no {' and no '.join(missing)}; another version wrote this checkpoint, so "
            "start a new run instead of resuming"
        )
    return state


def random_state() -> dict[str, Any]:
    """Random states of Python, NumPy and PyTorch in this process, as plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    cuda: Tensor | None = state["cuda"]
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
