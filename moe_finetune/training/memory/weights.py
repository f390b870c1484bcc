"""Bytes of a model's weights as a run stores them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.load_quantized import quantized_names
from moe_finetune.models import Family
from moe_finetune.models.structure import meta_model
from moe_finetune.moe.layers import backbone_of, causal_lm, family_in
from moe_finetune.quantization.codec import packed_shapes

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Weights:
    """Where the frozen and the trained weights lie.

    Attributes:
        by_type: bytes by dtype or quantisation, on the device and off it.
        host: those of them that are in the host's memory.
        staged: bytes on the device for expert stacks that come from the host, two layers at once.
        dequantized: the most that one layer's experts take when they are multiplied.
        trained: shapes of what trains, all float32; ``added`` are bytes of those that the model
            itself does not have.
        layer_gradients: bytes of gradients by decoder layer; ``other_gradients`` the rest;
            ``measured_gradients`` those in routers and routed experts, where losses are measured.
    """

    by_type: dict[str, int]
    host: int
    staged: int
    dequantized: int
    trained: list[tuple[int, ...]]
    added: int
    layer_gradients: list[int]
    other_gradients: int
    measured_gradients: int
    parameters: int

    @property
    def device(self) -> int:
        return sum(self.by_type.values()) - self.host + self.staged


def weights_of(model: nn.Module, recipe: Recipe) -> Weights:
    """Weigh an adapted model on the meta device.

    Args:
        model: as ``add_lora`` leaves it.
        recipe: says dtype, quantisation and offload.
    """
    backbone: Any = backbone_of(model)
    family, layers = family_in(model), len(backbone.layers)
    kind = recipe.model.quantization
    packed: frozenset[str] = frozenset()
    if kind != "none":
        packed = quantized_names(meta_model(causal_lm(model).config), family)
    offload = recipe.model.offload == "experts"
    item = 4 if recipe.lora is None or recipe.model.dtype == "float32" else 2
    experts, router = f".{family.experts_path}.", f".{family.router_path}."
    by_type: Counter[str] = Counter()
    stacks = [0] * layers  # as stored
    opened = [0] * layers  # as multiplied
    trained: list[tuple[int, ...]] = []
    gradients = [0] * layers
    added = other = measured = count = 0
    for name, parameter in model.named_parameters():
        index = layer_of(name, family)
        count += parameter.numel()
        if parameter.requires_grad:
            if experts in name or router in name:
                measured += 4 * parameter.numel()
            trained.append(tuple(parameter.shape))
            if index is None:
                other += 4 * parameter.numel()
            else:
                gradients[index] += 4 * parameter.numel()
        if is_added(name):
            added += 4 * parameter.numel()
            continue
        stack = experts in name and parameter.dim() == 3
        if _plain(name) in packed:
            size = quantized_bytes(tuple(parameter.shape), kind)
            by_type[kind] += size
        else:
            size = item * parameter.numel()
            by_type["float32" if item == 4 else "bfloat16"] += size
        if stack and index is not None:
            stacks[index] += size
            opened[index] += item * parameter.numel()
    host = sum(stacks) if offload else 0
    return Weights(
        dict(by_type),
        host,
        sum(sorted(stacks)[-2:]) if offload else 0,
        max(opened, default=0) if kind != "none" else 0,
        trained,
        added,
        gradients,
        other,
        measured,
        count,
    )


def quantized_bytes(shape: tuple[int, ...], kind: Any) -> int:
    """Bytes of a quantised matrix (R, C) or stack (E, R, C): packed weights and float32 scales."""
    *stacked, rows, columns = shape
    size, scales = packed_shapes(kind, rows, columns)
    return (stacked[0] if stacked else 1) * (size + 4 * scales)


def layer_of(name: str, family: Family) -> int | None:
    """The decoder layer of a parameter's name, None outside of them."""
    _, found, rest = f".{name}".partition(f".{family.backbone}.layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdigit() else None


def is_added(name: str) -> bool:
    """Whether training adds the parameter: a LoRA factor or the copy of a router."""
    return ".lora_" in name or ".modules_to_save." in name


def _plain(name: str) -> str:
    """A parameter's name without PEFT's wrapping."""
    return (
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".original_module", "")
    )
