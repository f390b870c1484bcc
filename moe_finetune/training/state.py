"""The toolkit's own state beside a trainer's checkpoint, as safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_finetune.errors import CheckpointError

STATE_FILE = "moe_finetune_state.safetensors"


def save_state(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write ``state`` (nothing when it is empty)."""
    if state:
        save_file({key: value.detach().cpu().contiguous() for key, value in state.items()}, path)


def load_state(path: Path) -> dict[str, torch.Tensor]:
    """Read what :func:`save_state` wrote; raise CheckpointError on a damaged file."""
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); delete this checkpoint") from None
