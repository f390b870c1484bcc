"""The short model that represents the whole one: its first layers, adapted, without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

Device = Literal["cuda", "cpu"]


def stand_in(kinds: list[Any], kind: Any, count: int) -> int:
    """The short model's layer that represents ``kind``: its last one before the final layer."""
    return max(index for index in range(count - 1) if kinds[index] == kind)


def adapted_model(config: Any, recipe: Recipe, device: Device) -> Any:
    """The adapted model on the meta device, with checkpointing set as TRL sets it."""
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models.structure import meta_model

    attention = recipe.model.attn_implementation
    if attention is not None and attention.startswith("flash"):
        attention = "sdpa"  # saves the same tensors without an extra package
    model: Any = meta_model(config, attention)
    if recipe.lora is None or recipe.model.dtype == "float32":
        model = model.float()
    lora = recipe.lora
    if lora is not None and lora.experts != "all":
        lora = lora.model_copy(update={"experts": "all"})  # the selection is of the whole model
    with torch.device("meta"):
        model = add_lora(model, lora, recipe.router.train).train()
    if checkpointing(recipe, device):
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "preserve_rng_state": False}  # no state on fake tensors
        )
        model.enable_input_require_grads()
    return model


def checkpointing(recipe: Recipe, device: Device) -> bool:
    """Whether layers are recomputed in the backward; by default only on GPUs."""
    return bool(recipe.trainer.get("gradient_checkpointing", device == "cuda"))


def give_memory(model: nn.Module) -> None:
    """Replace meta tensors with fake ones, which have a device; tied weights stay tied."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in copies:
                    memory = torch.empty(parameter.shape, dtype=parameter.dtype)
                    copies[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
                module._parameters[name] = copies[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
