"""Bytes that a run stores on one device: weights, adapter, gradients and optimizer states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.models.structure import meta_model
from moe_finetune.moe.grouped import DEQUANTIZED_BYTES
from moe_finetune.moe.layers import backbone_of, causal_lm, family_in
from moe_finetune.moe.quantized_model import quantized_names
from moe_finetune.quantization.codec import NF4, packed_shapes

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe

GIB = 2**30
DEFAULT_OPTIMIZER = "adamw_torch_fused"
SMALL, BLOCK = 4096, 256
"""bitsandbytes: elements below which a state stays in 32 bits, and that share a float32 scale."""


class Optimizer(NamedTuple):
    """State tensors of a parameter's shape, their bits, and temporary copies during an update.

    ``factored``: second moments are rows and columns. ``paged``: states are in memory shared with
    the host, and counted there.
    """

    moments: int
    bits: int = 32
    copies: int = 0
    factored: bool = False
    paged: bool = False


OPTIMIZERS = {
    "adamw_torch_fused": Optimizer(2),
    "adamw_torch": Optimizer(2, copies=2),
    "adamw_8bit": Optimizer(2, 8),
    "adamw_bnb_8bit": Optimizer(2, 8),
    "paged_adamw_32bit": Optimizer(2, paged=True),
    "paged_adamw": Optimizer(2, paged=True),
    "paged_adamw_8bit": Optimizer(2, 8, paged=True),
    "lion_32bit": Optimizer(1),
    "lion_8bit": Optimizer(1, 8),
    "paged_lion_32bit": Optimizer(1, paged=True),
    "paged_lion_8bit": Optimizer(1, 8, paged=True),
    "rmsprop": Optimizer(1, copies=1),
    "rmsprop_bnb": Optimizer(1),
    "rmsprop_bnb_8bit": Optimizer(1, 8),
    "adagrad": Optimizer(1, copies=1),
    "adafactor": Optimizer(0, factored=True, copies=2),
    "sgd": Optimizer(0),
}
"""By ``trainer.optim``; ``copies`` are of torch's foreach versions."""


def optimizer_of(name: str) -> Optimizer:
    """The optimizer that ``trainer.optim`` names; raise RecipeError if its states are unknown."""
    if name not in OPTIMIZERS:
        raise RecipeError(
            f"trainer.optim: the states of '{name}' are unknown, so its memory cannot be "
            f"planned{did_you_mean(name, OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def state_bytes(optimizer: Optimizer, shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of optimizer states for float32 parameters of these shapes."""
    total = 0
    for shape in shapes:
        size = math.prod(shape)
        if optimizer.factored:
            rows = size // shape[-1] if shape else 1
            total += 4 * (rows + size // rows if len(shape) > 1 else size)
        elif optimizer.bits == 8 and size >= SMALL:
            total += optimizer.moments * (size + 4 * -(-size // BLOCK))
        else:
            total += optimizer.moments * 4 * size
    return total


@dataclass(frozen=True)
class Stored:
    """What one device stores, in bytes.

    Attributes:
        weights_by: frozen and trained weights of the model by dtype or quantization, offloaded ones
            included; ``host``: the part of them in the host's memory.
        staged: on the device besides: two layers of offloaded stacks; with FSDP2 embeddings and
            head whole.
        opened: the most that a layer takes while it computes: some dequantized experts; with FSDP2
            the gathered layer and the next one, and a layer's gradients before and while they are
            reduced.
        adapter: factors and copies of routers, float32.
        trained: shapes of trained parameters, all float32.
        gradients: of all of them; ``measured_gradients``: of routers and routed experts, which are
            kept while the losses' strength is measured.
        parameters: number in the whole model.
    """

    weights_by: dict[str, int]
    host: int
    staged: int
    opened: int
    adapter: int
    trained: list[tuple[int, ...]]
    gradients: int
    measured_gradients: int
    parameters: int

    @property
    def weights(self) -> int:
        """On the device."""
        return sum(self.weights_by.values()) - self.host + self.staged


def stored_bytes(model: nn.Module, recipe: Recipe, gpus: int = 1) -> Stored:
    """Count an adapted model on the meta device.

    Args:
        model: the result of ``add_lora``.
        gpus: number of GPUs that share all but spread experts by FSDP2, one unit a decoder layer.

    Raises:
        RecipeError: a setting that FSDP2 refuses.
    """
    if gpus > 1 and recipe.model.offload != "none":
        raise RecipeError(
            f"model.offload: {recipe.model.offload} cannot be combined with FSDP2, which shares "
            "the weights among several GPUs; leave it out, or plan for one GPU"
        )
    backbone: Any = backbone_of(model)
    family, layers = family_in(model), len(backbone.layers)
    packed: frozenset[str] = frozenset()
    if recipe.model.quantization != "none":
        packed = quantized_names(meta_model(causal_lm(model).config), family)
    spread = gpus if recipe.parallel.experts == "all" else recipe.parallel.experts
    item = 4 if recipe.lora is None or recipe.model.dtype == "float32" else 2
    experts, router = f".{family.experts_path}.", f".{family.router_path}."
    by_type: Counter[str] = Counter()
    stacks, by_layer, layer_gradients = [0] * layers, [0] * layers, [0] * layers
    trained: list[tuple[int, ...]] = []
    adapter = outside = chunk = measured = parameters = 0
    for name, parameter in model.named_parameters():
        count, shape = parameter.numel(), tuple(parameter.shape)
        index, parameters = layer_of(name, family), parameters + count
        added = ".lora_" in name or ".modules_to_save." in name
        stack = experts in name and len(shape) == 3
        if added:
            size, kind = 4 * count, "float32"
        elif plain_name(name) in packed:
            size, kind = quantized_bytes(shape), NF4
            if stack:  # one at a time, some experts at once
                chunk = max(
                    chunk, min(item * count, max(DEQUANTIZED_BYTES, item * count // shape[0]))
                )
        else:
            size, kind = item * count, "float32" if item == 4 else "bfloat16"
        rows = shape[0] if shape else 1
        away = stack and not added and spread > 1
        ranks = spread if away else gpus
        own = size if ranks == 1 else -(-rows // ranks) * (size // rows)
        if index is not None and stack:
            stacks[index] += own
        if index is not None and not away:
            by_layer[index] += size
        if index is None:
            outside += size
        if added:
            adapter += own
        else:
            by_type[kind] += own
        if parameter.requires_grad:
            trained.append((-(-rows // gpus), *shape[1:]) if shape else shape)
            if index is not None:
                layer_gradients[index] += 4 * count
            if experts in name or router in name:
                measured += 4 * math.prod(trained[-1])
    offload = recipe.model.offload == "experts"
    staged = sum(sorted(stacks)[-2:]) if offload else 0
    opened = chunk
    if gpus > 1:
        staged, opened = outside, chunk + 2 * max(by_layer) + 2 * max(layer_gradients)
    return Stored(
        dict(by_type),
        sum(stacks) if offload else 0,
        staged,
        opened,
        adapter,
        trained,
        sum(4 * math.prod(shape) for shape in trained),
        measured,
        parameters,
    )


def quantized_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a quantized matrix (R, C) or stack (E, R, C): packed weights and float32 scales."""
    *stacked, rows, columns = shape
    size, scales = packed_shapes(rows, columns)
    return (stacked[0] if stacked else 1) * (size + 4 * scales)


def layer_of(name: str, family: Any) -> int | None:
    """The decoder layer in a parameter's name, or None."""
    _, prefix, suffix = f".{name}".partition(f".{family.backbone}.layers.")
    index = suffix.partition(".")[0]
    return int(index) if prefix and index.isdigit() else None


def plain_name(name: str) -> str:
    """A parameter's name without PEFT's prefixes."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".base_layer", "").replace(".original_module", "")
