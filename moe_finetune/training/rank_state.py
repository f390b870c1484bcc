"""What a checkpoint has of each rank: its random state, and the rows of one of the run's steps.

Any number of ranks can resume: each takes the random state of one old rank, and accumulates as many
micro-batches as keep the rows of a step. The run is then the same except for random draws while it
trains (dropout, jitter, completions) and rounding in the order of sums.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.errors import CheckpointError
from moe_finetune.training.state import pack, read_packed, to_bytes, unpack

FOLDER = "trainer"
"""Folder of a checkpoint for what only training reads."""


def rank_file(rank: int) -> str:
    """The path of a rank's file in a checkpoint."""
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def pack_rank(args: Any, **state: Any) -> bytes:
    """This rank's file."""
    tensors: dict[str, Tensor] = {}
    written_by = {"world_size": args.world_size, "rows": rows_of(args)}
    return to_bytes(pack({**written_by, "random": random_state(), **state}, tensors, ""), tensors)


def read_rank(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The state that ``rank`` resumes from: its own, or with more ranks that of another.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first = unpack(*read_packed(checkpoint / rank_file(0)))
    old = rank % first["world_size"]
    return unpack(*read_packed(checkpoint / rank_file(old))) if old else first


def rows_of(args: Any) -> int:
    """Rows of one optimizer step, over all ranks."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def accumulation(checkpoint: Path, args: Any) -> int:
    """The accumulation that gives steps as many rows as those of ``checkpoint``.

    With as many processes as the checkpoint's run had, this is the accumulation in ``args``.

    Raises:
        CheckpointError: no accumulation gives that many rows.
    """
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


def check_rows(checkpoint: Path, args: Any) -> None:
    """Refuse a different number of processes if it changes the number of rows per step.

    Raises:
        CheckpointError: the size differs; the message names the accumulation that keeps it.
    """
    steps = accumulation(checkpoint, args)
    if steps != args.gradient_accumulation_steps:
        raise CheckpointError(
            f"{checkpoint}: was not written by {args.world_size} processes; set "
            f"gradient_accumulation_steps={steps} to keep the number of rows per step"
        )


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
