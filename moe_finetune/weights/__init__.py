"""Checkpoints in and out, without building the model."""

from moe_finetune.weights.apply import MergeReport, merge_adapter
from moe_finetune.weights.card import write_card
from moe_finetune.weights.checkpoint import Checkpoint, open_checkpoint
from moe_finetune.weights.permute import PermuteReport, inverse, permute_experts, read_permutation
from moe_finetune.weights.selection import AdapterMetadata, read_metadata, write_metadata

__all__ = [
    "AdapterMetadata",
    "Checkpoint",
    "MergeReport",
    "PermuteReport",
    "inverse",
    "merge_adapter",
    "open_checkpoint",
    "permute_experts",
    "read_metadata",
    "read_permutation",
    "write_card",
    "write_metadata",
]
