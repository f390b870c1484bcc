"""Read, merge and write checkpoints without building the model."""

from moe_finetune.checkpoint.adapter_metadata import AdapterMetadata, read_metadata, write_metadata
from moe_finetune.checkpoint.card import write_card
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.merge import MergeReport, merge_adapter
from moe_finetune.checkpoint.opened import open_checkpoint

__all__ = [
    "AdapterMetadata",
    "Checkpoint",
    "MergeReport",
    "merge_adapter",
    "open_checkpoint",
    "read_metadata",
    "write_card",
    "write_metadata",
]
