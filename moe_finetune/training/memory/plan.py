"""Predict a run's peak memory: what it stores, counted, and one step, by a formula.

Not counted: completions that GRPO generates, what a kernel allocates inside, buffers of NCCL and of
FSDP2 beyond two open layers, and fragmentation.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_finetune.errors import RecipeError
from moe_finetune.io.counted import counted
from moe_finetune.models.class_structure import meta_model
from moe_finetune.moe.experts.grouped_products import DEQUANTIZED_BYTES
from moe_finetune.moe.large.quantized_weights import quantized_names
from moe_finetune.moe.layers import backbone_of, causal_lm, places_in
from moe_finetune.quantization.codec import NF4, packed_shapes
from moe_finetune.training import ranks
from moe_finetune.training.memory.micro_batch import MicroBatch, evaluation_batch, micro_batch
from moe_finetune.training.memory.step_bytes import (
    AFTER_MEASURING,
    EVALUATION,
    MEASURING,
    Device,
    scan_of,
    step_bytes,
)

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.data.row_lengths import LengthsOfData
    from moe_finetune.recipe.schema import Recipe

GIB = 2**30
RESERVED = 0.06
"""Share of a GPU's memory that is unavailable to tensors: CUDA's context, kernels' workspaces,
fragmentation. An assumption; ``make gpu-check`` measures it."""

SCANS = "Mamba and linear attention: by torch's code, or not counted if their kernels are installed"
BOUND = 0.15
"""Largest error of a step's formula in tests: a plan that is over by less is not refused."""


# -- what a run stores ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """What one device stores, in bytes.

    Attributes:
        weights_by: of the model by dtype or quantization; ``host``: the part in the host's memory.
        staged: on the device besides: two layers of offloaded stacks; with FSDP2 the embeddings.
        opened: the most that a layer takes while it computes: some dequantized experts; with FSDP2
            the gathered layer and the next one, and their gradients until they are reduced.
        measured_gradients: kept while the losses' strength is measured.
        states: of the optimizer; ``paged``: in memory shared with the host;
            ``unknown_optimizer``: its name, if its states count as Adam's without being measured.
    """

    weights_by: dict[str, int]
    host: int
    staged: int
    opened: int
    reference: int
    adapter: int
    gradients: int
    measured_gradients: int
    states: int
    paged: bool
    parameters: int
    unknown_optimizer: str | None = None

    @property
    def weights(self) -> int:
        """On the device."""
        return sum(self.weights_by.values()) - self.host + self.staged

    @property
    def states_on_device(self) -> int:
        return 0 if self.paged else self.states

    @property
    def fixed(self) -> int:
        """Bytes on the device that do not depend on the batch."""
        model = self.weights + self.reference + self.adapter
        return model + self.gradients + self.states_on_device


STATE_BYTES: dict[str, int] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), 8),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), 2),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), 12),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), 3),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "adagrad"), 4),
    **dict.fromkeys(("rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit"), 4),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1),
    **dict.fromkeys(("sgd", "adafactor"), 0),
}
"""Bytes of an optimizer's states for each number that trains, as measured after an update."""
_OF_ADAM = 8


def optimizer_of(recipe: Recipe) -> str:
    """The value of ``trainer.optim``."""
    return str(recipe.trainer.get("optim", "adamw"))


def state_bytes(recipe: Recipe, trained: int) -> int:
    """Bytes of the optimizer's states for so many trained numbers; unknown ones count as Adam's."""
    return STATE_BYTES.get(optimizer_of(recipe), _OF_ADAM) * trained


def stored_bytes(model: nn.Module, recipe: Recipe, gpus: int = 1) -> Stored:
    """Count an adapted model on the meta device, of which ``gpus`` share all but spread experts."""
    offload = recipe.model.offload == "experts"
    if gpus > 1 and offload:
        raise RecipeError(
            "model.offload: experts cannot be combined with FSDP2, which shares the weights among "
            "several GPUs; leave it out, or plan for one GPU"
        )
    places = places_in(model)
    layers: Any = enumerate(backbone_of(model).layers)
    layer_of = {id(p): index for index, layer in layers for p in layer.parameters()}
    packed: frozenset[str] = frozenset()
    if recipe.model.quantization != "none":
        packed = quantized_names(meta_model(causal_lm(model).config), places)
    spread = gpus if recipe.parallel.experts == "all" else recipe.parallel.experts
    item = 4 if recipe.lora is None or recipe.model.dtype == "float32" else 2
    weights_by: Counter[str] = Counter()
    # Of each layer, or None outside: expert stacks; what FSDP2 gathers; gradients that it reduces.
    stacks = Counter[Any]()
    gathered = Counter[Any]()
    reduced = Counter[Any]()
    adapter = dequantized = trained = measured = parameters = unsharded = 0
    for name, parameter in model.named_parameters():
        shape, count = tuple(parameter.shape), parameter.numel()
        layer = layer_of.get(id(parameter))
        parameters += count
        added = ".lora_" in name or ".modules_to_save." in name
        stack = not added and len(shape) == 3 and f".{places.experts_path}." in name
        plain = name.replace(".base_layer", "").replace(".original_module", "")
        kind = "float32" if item == 4 else "bfloat16"
        if not added and plain.removeprefix("base_model.model.") in packed:
            kind = NF4
            if stack:  # one at a time, some experts at once
                chunk = max(DEQUANTIZED_BYTES, item * count // shape[0])
                dequantized = max(dequantized, min(item * count, chunk))

        def size_of(shape: tuple[int, ...], kind: str = kind, added: bool = added) -> int:
            return (
                quantized_bytes(shape) if kind == NF4 else (4 if added else item) * math.prod(shape)
            )

        is_spread = stack and spread > 1
        size, local = size_of(shape), size_of(shard(shape, spread if is_spread else gpus))
        if added:
            adapter += local
        else:
            weights_by[kind] += local
            unsharded += size
        if stack:
            stacks[layer] += local
        if not is_spread:
            gathered[layer] += size
        if parameter.requires_grad:
            local_count = math.prod(shard(shape, gpus))
            trained += local_count
            reduced[layer] += 4 * count
            if f".{places.experts_path}." in name or f".{places.router_path}." in name:
                measured += 4 * local_count
    staged, opened = sum(sorted(stacks.values())[-2:]) if offload else 0, dequantized
    if gpus > 1:
        staged, _ = gathered.pop(None, 0), reduced.pop(None, 0)
        opened += 2 * max(gathered.values()) + 2 * max(reduced.values(), default=0)
    reference = micro_batch(recipe).reference
    name = optimizer_of(recipe)
    return Stored(
        weights_by=dict(weights_by),
        host=stacks.total() if offload else 0,
        staged=staged,
        opened=opened,
        reference=unsharded if reference else 0,  # it is opened as the trained model is
        adapter=adapter,
        gradients=4 * trained,
        measured_gradients=measured,
        states=state_bytes(recipe, trained),
        paged="paged" in name,
        parameters=parameters,
        unknown_optimizer=None if name in STATE_BYTES else name,
    )


def shard(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The largest part of a tensor among so many ranks: FSDP2 splits the first dimension."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else shape


def quantized_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a quantized matrix (R, C) or stack (E, R, C): packed weights and float32 scales."""
    *stacked, rows, columns = shape
    size, scales = packed_shapes(rows, columns)
    return math.prod(stacked) * (size + 4 * scales)


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, at its worst ``moment``.

    ``optimizer``: states at that moment, none before the first update; ``step``: activations,
    working memory and gradients; ``scans``: whether layers have states of their own.
    """

    stored: Stored
    optimizer: int
    step: int
    moment: str
    batch: MicroBatch
    device: Device
    scans: bool = False

    @property
    def total(self) -> int:
        """Peak bytes."""
        stored = self.stored
        return stored.weights + stored.reference + stored.adapter + self.optimizer + self.step

    @property
    def activations(self) -> int:
        return self.total - self.stored.fixed

    def to_mapping(self) -> dict[str, Any]:
        stored = self.stored
        return {
            "weights": stored.weights,
            "weights_by": stored.weights_by,
            "host": stored.host + stored.states - stored.states_on_device,
            "second": stored.reference,
            "adapter": stored.adapter,
            "optimizer": self.optimizer,
            "all_states": stored.states_on_device,
            "step": self.step,
            "all_gradients": stored.gradients,
            "activations": self.activations,
            "total": self.total,
            "moment": self.moment,
            "tokens": self.batch.tokens,
            "stage": str(self.batch),
            "device": self.device,
        }

    def room(self, gib: float) -> float:
        """Bytes for tensors of a device with so many GiB."""
        return gib * GIB * (1 - RESERVED if self.device == "cuda" else 1)

    def fits(self, gib: float) -> bool:
        """Whether the peak is below what a device of so many GiB has for tensors."""
        return self.total <= self.room(gib)

    def exceeds(self, gib: float) -> bool:
        """Whether even a peak that is smaller by the plan's error is above it."""
        return (1 - BOUND) * self.total > self.room(gib)

    def verdict(self, gib: float) -> str:
        """:meth:`fits` and :meth:`exceeds` as a line of text."""
        answer, more = "fits", ""
        if not self.fits(gib):
            answer, more = "may not fit", f"; the plan may be {BOUND:.0%} off, and "
            if self.exceeds(gib):
                answer, more = "does not fit", "; "
            if self.moment == EVALUATION:
                more += "lower trainer.per_device_eval_batch_size; "
            more += "docs/memory.md lists changes that help"
        room = f"{self.room(gib) / GIB:.1f} of {gib:.1f} GiB are for tensors"
        return f"{answer}: needs {self.total / GIB:.1f} GiB; {room}{more}"

    def lines(self) -> list[str]:
        """A text table."""
        stored = self.stored
        by_type = ", ".join(f"{size / GIB:.2f} {name}" for name, size in stored.weights_by.items())
        later = f"{stored.states / GIB:.2f} after the first update"
        if self.optimizer == stored.states:
            later = ""
        if stored.unknown_optimizer is not None:
            later += f"  {stored.unknown_optimizer} is not measured, and counts as AdamW"
        rows = [
            ("weights", stored.weights, by_type),
            *([("reference", stored.reference, "a second model")] if stored.reference else []),
            ("adapter", stored.adapter, "float32"),
            ("optimizer", self.optimizer, later.strip()),
            ("step", self.step, f"gradients and activations, ±{BOUND:.0%}: {self.moment}"),
            ("total", self.total, ""),
            *([("host", stored.host, "pinned memory")] if stored.host else []),
        ]
        device = "one GPU" if self.device == "cuda" else "this CPU"
        batch = f"micro-batch of {counted(self.batch.tokens, 'token')} ({self.batch})"
        head = f"memory on {device}, {batch}, at its worst moment:"
        lines = [head, *(f"  {n:<12} {s / GIB:8.2f} GiB  {w}".rstrip() for n, s, w in rows)]
        if self.scans:
            lines.append(f"  {SCANS}")
        return lines


def plan_recipe(
    config: Any,
    recipe: Recipe,
    device: Device = "cuda",
    gpus: int = 1,
    chosen: Mapping[int, list[int]] | None = None,
    lengths: LengthsOfData | None = None,
) -> MemoryPlan:
    """Predict the memory of ``recipe`` on one device, whose kind decides TRL's code for logits.

    ``gpus``: how many share weights, gradients and states by FSDP2; ``chosen``: the experts that
    get LoRA where the run measures them; ``lengths``: of the run's rows, if they are read.
    """
    from moe_finetune.lora.targets import add_lora

    with quiet():
        model = meta_model(config)
        with torch.device("meta"):
            router = recipe.router
            adapted = add_lora(model, recipe.lora, router.train, router.layers, chosen)
        return plan_model(adapted, recipe, device, gpus, lengths)


def plan_model(
    model: nn.Module,
    recipe: Recipe,
    device: Device,
    gpus: int = 1,
    lengths: LengthsOfData | None = None,
) -> MemoryPlan:
    """:func:`plan_recipe` of an adapted model, of which only shapes are read."""
    stored = stored_bytes(model, recipe, gpus)
    peaks = step_bytes(model, recipe, device, stored.gradients if gpus == 1 else 0, lengths)
    always = stored.opened + (stored.gradients if gpus > 1 else 0)
    peaks = {moment: peak + always for moment, peak in peaks.items()}
    peaks["optimizer step"] = stored.gradients
    terms = recipe.method.terms.values()
    # Measuring keeps the gradients of routers and experts by each loss until the step ends, in the
    # host's memory if they would take more than the weights.
    measured = stored.measured_gradients * (len(terms) + 1)
    if MEASURING in peaks and (device == "cpu" or measured // 4 <= stored.parameters):
        peaks[MEASURING] += measured - stored.measured_gradients
        peaks[AFTER_MEASURING] += measured
    repeated = any(options.every is not None for options in terms)

    def states(moment: str) -> int:
        # Strength is measured in the first step, which has no states yet.
        return stored.states_on_device if repeated or MEASURING not in moment else 0

    moment = max(peaks, key=lambda name: peaks[name] + states(name))
    scans = any(scan_of(layer)[1] for layer in backbone_of(model).layers)
    batch = micro_batch(recipe, lengths)
    if moment == EVALUATION:
        batch = evaluation_batch(recipe, lengths) or batch
    return MemoryPlan(stored, states(moment), peaks[moment], moment, batch, device, scans)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about a model that is only measured or checked."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


# -- the machine ----------------------------------------------------------------------------------


def machine_bytes() -> int:
    """Total memory of this run's devices in bytes, or of this machine if it has no GPU."""
    import psutil

    if not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory) * ranks.world_size()
