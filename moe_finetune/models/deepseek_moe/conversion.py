"""Names on disk of DeepSeek-MoE: one matrix per expert and projection, fused in memory.

``mlp.experts.M.{gate,up}_proj.weight`` (D, H) <-> ``mlp.experts.gate_up_proj`` (E, 2D, H), gate
rows first; ``mlp.experts.M.down_proj.weight`` (H, D) <-> ``mlp.experts.down_proj`` (E, H, D).
"""

from __future__ import annotations

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


def register_names(model_type: str) -> None:
    """Register the mapping; transformers applies it on load and its inverse on save."""
    register_checkpoint_conversion_mapping(
        model_type,
        [
            WeightConverter(
                source_patterns=[
                    "mlp.experts.*.gate_proj.weight",
                    "mlp.experts.*.up_proj.weight",
                ],
                target_patterns="mlp.experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns="mlp.experts.*.down_proj.weight",
                target_patterns="mlp.experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
        overwrite=True,
    )
