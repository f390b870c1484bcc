"""Activation checkpointing that works with recording, and refusal of the kinds that do not.

A decoder layer that runs again in the backward is recorded again. This works with transformers'
checkpointing and with torch's wrapper (accelerate's activation checkpointing), if whole decoder
layers run again, without a key-value cache and not reentrantly.

Under torch's wrapper, and up to transformers 5.22, a layer's hooks run again with it. From 5.23 the
hooks are outside of what runs again, which is the layer's forward: see :class:`RunsAgain`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from moe_finetune.errors import CaptureError

_INNER = "_checkpoint_wrapped_module"
_FUNCTION = "_gradient_checkpointing_func"
REENTRANT = (
    "reentrant gradient checkpointing gives wrong gradients of losses between layers; set "
    "gradient_checkpointing_kwargs={'use_reentrant': False} (LLaMA-Factory: use_reentrant_gc: "
    "false), or CheckpointImpl.NO_REENTRANT in torch's checkpoint wrapper"
)


def inside(decoder_layer: Any) -> Any:
    """The layer inside torch's checkpoint wrapper; only the inside runs again."""
    return getattr(decoder_layer, _INNER, decoder_layer)


def checkpoints(layers: Iterable[Any]) -> bool:
    """Whether any decoder layer runs again in the backward."""
    return any(
        hasattr(layer, _INNER) or getattr(layer, "gradient_checkpointing", False)
        for layer in layers
    )


def saves_some(layers: Iterable[Any]) -> bool:
    """Whether checkpointing is selective, whose graph allows one backward only."""
    return any(
        "context_fn" in getattr(getattr(layer, _FUNCTION, None), "keywords", {})
        for layer in layers
        if getattr(layer, "gradient_checkpointing", False)
    )


def checkpoint_layers(model: Any, **options: Any) -> None:
    """Turn transformers' checkpointing on, by its name since 5.23 or before."""
    new = getattr(model, "activation_checkpointing_enable", None)
    enable = model.gradient_checkpointing_enable if new is None else new
    enable({"use_reentrant": False, **options})


def check_block(block: nn.Module, index: int) -> None:
    """Refuse a checkpoint wrapper within the MoE block of layer ``index``.

    The loss is evaluated outside the wrapper, from tensors that the wrapper discards.
    """
    if any(hasattr(module, _INNER) for module in block.modules()):
        raise CaptureError(
            f"layer {index}: a checkpoint wrapper is around the MoE block or a part of it; wrap "
            "whole decoder layers (check_fn, or accelerate's transformer_cls_names_to_wrap)"
        )


def check_layers(layers: Iterable[Any], use_cache: bool) -> None:
    """Refuse checkpointing that would compute wrong losses; called before each forward."""
    for layer in layers:
        wrapped = hasattr(layer, _INNER)
        function: Any = getattr(layer, _FUNCTION, None)
        active = getattr(layer, "gradient_checkpointing", False) and isinstance(function, partial)
        if (wrapped and layer.checkpoint_impl.name == "REENTRANT") or (
            active and function.keywords.get("use_reentrant") is not False
        ):
            raise CaptureError(REENTRANT)
        if wrapped and use_cache:
            raise CaptureError(
                "a decoder layer in torch's checkpoint wrapper runs again in the backward pass "
                "and would write its keys and values to the cache twice; set "
                "model.config.use_cache = False, or call the model with use_cache=False"
            )


class RunsAgain:
    """Does in each visit of a checkpointed decoder layer what its hooks do before and after it.

    During a forward, the function that transformers checkpoints the layer with is replaced by one
    that calls these before and after what it is given.

    Args:
        end_layer: called with the layer's output; returns the output.
        finish: called last, also when the recomputation stops early.
    """

    def __init__(
        self, layer: nn.Module, end_layer: Callable[[Any], Any], finish: Callable[[], None]
    ):
        self._layer, self._end_layer, self._finish = layer, end_layer, finish
        self._original: Any = None

    def begin(self, enter: Callable[[], None]) -> None:
        """Called before the layer's forward."""
        function = self._layer.__dict__.get(_FUNCTION)
        if function is None or self._original is not None:
            return
        self._original = function

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def visit(*inputs: Any, **options: Any) -> Any:
                enter()
                try:
                    return self._end_layer(forward(*inputs, **options))
                finally:
                    self._finish()

            return function(visit, *args, **kwargs)

        self._layer.__dict__[_FUNCTION] = run

    def end(self, *_: Any) -> None:
        """Called after it, also after an error."""
        if self._original is not None:
            self._layer.__dict__[_FUNCTION] = self._original
            self._original = None
