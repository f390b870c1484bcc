"""Read, merge and write checkpoints without building the model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapter import read_metadata, write_metadata
    from moe_finetune.checkpoint.merge import merge_adapter
    from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "merge_adapter", "open_checkpoint", "read_metadata", "write_metadata"]
_HOMES = {
    "Checkpoint": "open",
    "merge_adapter": "merge",
    "open_checkpoint": "open",
    "read_metadata": "adapter",
    "write_metadata": "adapter",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: merging imports torch."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
