"""Bytes of a model's weights as a run stores them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.models import Family
from moe_finetune.models.structure import meta_model
from moe_finetune.moe.grouped import DEQUANTIZED_BYTES
from moe_finetune.moe.layers import backbone_of, causal_lm, family_in
from moe_finetune.moe.quantized_model import quantized_names
from moe_finetune.quantization.codec import packed_shapes

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Weights:
    """Where frozen and trained weights are stored, and their sizes.

    Attributes:
        by_type: bytes by dtype or quantization, on the device and off it.
        host: the part of them in the host's memory.
        staged: bytes on the device for offloaded expert stacks, two layers at once; with FSDP2, for
            whole embeddings and head.
        opened: the most that a layer takes while it computes, above what is stored: some
            dequantized experts, and with FSDP2 the gathered layer and the next one.
        trained: shapes of trained parameters, all float32; ``added``: bytes of those that the model
            itself lacks.
        layer_gradients: bytes of gradients by decoder layer; ``other_gradients``: the rest;
            ``measured_gradients``: those of routers and routed experts, used to measure losses.
        layers: bytes by decoder layer as stored, added parameters included.
        rows: type, rows, and bytes per row of each tensor; added parameters have type "added".
    """

    by_type: dict[str, int]
    host: int
    staged: int
    opened: int
    trained: list[tuple[int, ...]]
    added: int
    layer_gradients: list[int]
    other_gradients: int
    measured_gradients: int
    parameters: int
    layers: list[int]
    rows: list[tuple[str, int, int]]

    @property
    def device(self) -> int:
        return sum(self.by_type.values()) - self.host + self.staged

    def sharded(self, ranks: int) -> Weights:
        """One rank's part under FSDP2 with one unit per decoder layer, resharded after use.

        While a layer computes, the next one's weights are gathered too. A layer's gradients exist
        whole before they are reduced, and again as the reduction's input. Embeddings and head count
        as always gathered, which overestimates them.
        """

        def share(size: int) -> int:
            return -(-size // ranks)

        stored: Counter[str] = Counter()
        for kind, rows, size in self.rows:
            stored[kind] += share(rows) * size
        added = stored.pop("added", 0)
        layer, gradients = max(self.layers), max(self.layer_gradients)
        return Weights(
            by_type=dict(stored),
            host=0,
            staged=sum(self.by_type.values()) + self.added - sum(self.layers),
            opened=self.opened + 2 * layer + 2 * gradients,
            trained=[(share(shape[0]), *shape[1:]) if shape else shape for shape in self.trained],
            added=added,
            layer_gradients=[share(size) for size in self.layer_gradients],
            other_gradients=share(self.other_gradients),
            measured_gradients=share(self.measured_gradients),
            parameters=self.parameters,
            layers=[share(size) for size in self.layers],
            rows=[(kind, share(rows), size) for kind, rows, size in self.rows],
        )


def weights_of(model: nn.Module, recipe: Recipe) -> Weights:
    """Compute the sizes of an adapted model on the meta device.

    Args:
        model: the result of ``add_lora``.
        recipe: gives dtype, quantization and offload.
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
    opened = [0] * layers  # as multiplied, at once
    trained: list[tuple[int, ...]] = []
    gradients = [0] * layers
    by_layer = [0] * layers
    rows: list[tuple[str, int, int]] = []
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
        first = parameter.shape[0] if parameter.dim() else 1
        if is_added(name):
            rows.append(("added", first, 4 * parameter.numel() // first))
            added += 4 * parameter.numel()
            if index is not None:
                by_layer[index] += 4 * parameter.numel()
            continue
        stack = experts in name and parameter.dim() == 3
        if _plain(name) in packed:
            size, stored = quantized_bytes(tuple(parameter.shape), kind), str(kind)
        else:
            size, stored = item * parameter.numel(), "float32" if item == 4 else "bfloat16"
        by_type[stored] += size
        rows.append((stored, first, size // first))
        if index is not None:
            by_layer[index] += size
        if stack and index is not None:
            stacks[index] += size
            whole, experts_of_stack = item * parameter.numel(), parameter.shape[0]
            chunk = min(whole, max(DEQUANTIZED_BYTES, whole // experts_of_stack))
            opened[index] = max(opened[index], chunk)  # one stack at a time
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
        by_layer,
        rows,
    )


def quantized_bytes(shape: tuple[int, ...], kind: Any) -> int:
    """Bytes of a quantized matrix (R, C) or stack (E, R, C): packed weights and float32 scales."""
    *stacked, rows, columns = shape
    size, scales = packed_shapes(kind, rows, columns)
    return (stacked[0] if stacked else 1) * (size + 4 * scales)


def layer_of(name: str, family: Family) -> int | None:
    """The decoder layer in a parameter's name, or None."""
    _, prefix, suffix = f".{name}".partition(f".{family.backbone}.layers.")
    index = suffix.partition(".")[0]
    return int(index) if prefix and index.isdigit() else None


def is_added(name: str) -> bool:
    """Whether training adds the parameter: a LoRA factor or a copy of a router."""
    return ".lora_" in name or ".modules_to_save." in name


def _plain(name: str) -> str:
    """A parameter's name without PEFT's prefixes."""
    return (
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".original_module", "")
    )
