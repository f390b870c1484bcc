"""A model on the meta device, with the attention that a run asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_finetune.models.structure import class_of

if TYPE_CHECKING:
    from torch import nn


def meta_model(config: Any, attn_implementation: str | None = None) -> nn.Module:
    """The model of ``config`` on the meta device: names and shapes, no memory."""
    import torch

    with torch.device("meta"):
        return class_of(config).from_config(
            config, dtype=torch.bfloat16, attn_implementation=attn_implementation
        )
