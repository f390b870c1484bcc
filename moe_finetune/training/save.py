"""What training leaves: an ordinary PEFT adapter, or the whole model when there is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_finetune.balancing.bias import BiasBalancer
from moe_finetune.capture.recorder import moe_layers
from moe_finetune.recipe import Recipe
from moe_finetune.training.state import load_state, save_state

BIAS_FILE = "router_bias.safetensors"


def save_trained(
    model: nn.Module,
    tokenizer: Any,
    recipe: Recipe,
    output: Path,
    balancer: BiasBalancer | None = None,
) -> Path:
    """Write ``adapter/``, or ``merged/`` when the model trained without an adapter.

    A loss-free bias lies beside the adapter in ``router_bias.safetensors``; the merge puts it where
    the family keeps one. The folder appears complete or not at all.
    """
    from peft import PeftModel

    from moe_finetune.weights import write_metadata

    adapted = isinstance(model, PeftModel)
    target = output / ("adapter" if adapted else "merged")
    partial = output / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    if adapted:
        model.save_pretrained(str(partial))
        assert recipe.lora is not None
        write_metadata(
            partial,
            experts_dropout=recipe.lora.dropout,
            method=recipe.method.preset,
            recipe=recipe.hash,
        )
        if balancer is not None:
            save_state(partial / BIAS_FILE, balancer.effective(moe_layers(model)))
        # PEFT's own card holds the base's local path; the run's recipe says it better.
        (partial / "README.md").unlink(missing_ok=True)
    else:
        dtype = getattr(torch, recipe.model.dtype)
        model.to(dtype).save_pretrained(partial)  # type: ignore[operator]
        tokenizer.save_pretrained(partial)
    partial.rename(target)
    return target


def load_bias(adapter: Path) -> dict[int, list[float]] | None:
    """The loss-free bias beside an adapter, by decoder layer, or None."""
    if not (adapter / BIAS_FILE).exists():
        return None
    state = load_state(adapter / BIAS_FILE)
    return {int(key.removeprefix("bias.")): value.tolist() for key, value in state.items()}
