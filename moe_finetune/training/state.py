"""The toolkit's own tensors in files and in text, as safetensors."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from moe_finetune.errors import CheckpointError

TRAINER_FILE = "trainer_state.json"
"""Transformers' own state of a trainer and its callbacks, in every checkpoint."""


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


def to_text(state: dict[str, torch.Tensor]) -> str:
    """``state`` as ASCII, bit for bit, for a place that holds text alone."""
    held = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    return base64.b64encode(save(held)).decode("ascii")


def from_text(text: str, where: str) -> dict[str, torch.Tensor]:
    """Read what :func:`to_text` returned; raise CheckpointError naming ``where`` when damaged."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (binascii.Error, SafetensorError, ValueError, TypeError) as problem:
        raise CheckpointError(f"{where}: cannot be read ({problem})") from None
