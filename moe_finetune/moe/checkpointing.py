"""Activation checkpointing that a recording can stand, and a clear refusal of the others.

A decoder layer that is run again in the backward does all of the recording's work again. That holds
for transformers' own checkpointing and for torch's wrapper (accelerate's activation checkpointing),
as long as whole decoder layers are run again, without a key-value cache, and not reentrantly.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

from moe_finetune.errors import CaptureError

_INNER = "_checkpoint_wrapped_module"
REENTRANT = (
    "reentrant gradient checkpointing gives wrong gradients of losses between layers; set "
    "gradient_checkpointing_kwargs={'use_reentrant': False} (LLaMA-Factory: use_reentrant_gc: "
    "false), or CheckpointImpl.NO_REENTRANT in torch's checkpoint wrapper"
)


def inside(decoder_layer: Any) -> Any:
    """The layer itself, under torch's checkpoint wrapper; only what is inside runs again."""
    return getattr(decoder_layer, _INNER, decoder_layer)


def checkpoints(layers: Iterable[Any]) -> bool:
    """Whether one of the decoder layers is run again in the backward."""
    return any(
        hasattr(layer, _INNER) or getattr(layer, "gradient_checkpointing", False)
        for layer in layers
    )


def check_block(block: nn.Module, index: int) -> None:
    """Refuse a checkpoint wrapper within the MoE block of layer ``index``.

    The loss is evaluated outside of it, from tensors that it throws away.

    Raises:
        CaptureError: the block, its router or its experts are wrapped.
    """
    if any(hasattr(module, _INNER) for module in block.modules()):
        raise CaptureError(
            f"layer {index}: a checkpoint wrapper is around the MoE block or a part of it; wrap "
            "whole decoder layers (check_fn, or accelerate's transformer_cls_names_to_wrap)"
        )


def check_layers(layers: Iterable[Any], use_cache: bool) -> None:
    """Refuse what would go wrong when one of the decoder layers runs again; before each forward.

    Raises:
        CaptureError: reentrant checkpointing, or a wrapped layer with a cache.
    """
    for layer in layers:
        wrapped = hasattr(layer, _INNER)
        function: Any = getattr(layer, "_gradient_checkpointing_func", None)
        active = getattr(layer, "gradient_checkpointing", False) and isinstance(function, partial)
        if (wrapped and layer.checkpoint_impl is CheckpointImpl.REENTRANT) or (
            active and function.keywords.get("use_reentrant") is not False
        ):
            raise CaptureError(REENTRANT)
        if wrapped and use_cache:
            raise CaptureError(
                "a decoder layer in torch's checkpoint wrapper runs again in the backward pass "
                "and would write its keys and values to the cache twice; set "
                "model.config.use_cache = False, or call the model with use_cache=False"
            )
