"""Checkpoints in and out, without building the model."""

from moe_finetune.weights.apply import MergeReport, merge_adapter
from moe_finetune.weights.checkpoint import Checkpoint, open_checkpoint
from moe_finetune.weights.selection import AdapterMetadata, read_metadata, write_metadata

__all__ = [
    "AdapterMetadata",
    "Checkpoint",
    "MergeReport",
    "merge_adapter",
    "open_checkpoint",
    "read_metadata",
    "write_metadata",
]
