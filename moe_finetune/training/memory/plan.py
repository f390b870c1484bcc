"""Predict a run's peak memory: what it stores, and one step on fake tensors.

Not counted: what a kernel allocates inside, buffers of NCCL and of FSDP2 beyond two open layers,
and fragmentation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_finetune.training.memory.step import Device, StepShape, step_peaks, step_shape
from moe_finetune.training.memory.stored import (
    DEFAULT_OPTIMIZER,
    GIB,
    Stored,
    optimizer_of,
    state_bytes,
    stored_bytes,
)

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

RESERVED = 0.06
"""Share of a GPU's memory that is unavailable to tensors: CUDA's context, kernels' workspaces,
fragmentation. An assumption; ``make gpu-check`` measures it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        weights: as stored on the device; ``weights_by`` dtype or quantization, offloaded ones
            included; ``second``: of a reference.
        adapter: LoRA factors and copies of routers, float32.
        optimizer: states at the peak; ``all_states`` once they exist, after the first update.
        step: activations, working memory and gradients at the peak; ``all_gradients``: once all
            exist.
        moment: when the peak occurs.
        host: bytes in the host's pinned memory, or shared with it.
        tokens: tokens of a micro-batch; ``stage`` describes it; ``device``: it is planned for.
    """

    weights: int
    second: int
    adapter: int
    optimizer: int
    step: int
    moment: str
    all_gradients: int
    all_states: int
    weights_by: dict[str, int]
    host: int
    tokens: int
    stage: str
    device: Device

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.weights + self.second + self.adapter + self.optimizer + self.step

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch: weights, adapter, gradients and states."""
        return self.weights + self.second + self.adapter + self.all_states + self.all_gradients

    @property
    def activations(self) -> int:
        return self.total - self.fixed

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "activations": self.activations}

    def fits(self, gpu_gib: float) -> bool:
        """Whether the peak is below what a GPU of so many GiB has for tensors."""
        return self.total <= gpu_gib * GIB * (1 - RESERVED)

    def verdict(self, gpu_gib: float) -> str:
        """:meth:`fits` as a line of text."""
        answer, more = "fits", ""
        if not self.fits(gpu_gib):
            answer, more = "does not fit", "; docs/memory.md lists changes that help"
        room = f"{gpu_gib * (1 - RESERVED):.1f} of {gpu_gib:.1f} GiB are for tensors"
        return f"{answer}: needs {self.total / GIB:.1f} GiB; {room}{more}"

    def lines(self) -> list[str]:
        """A text table."""
        by_type = ", ".join(f"{size / GIB:.2f} {name}" for name, size in self.weights_by.items())
        later = "" if self.optimizer == self.all_states else " then, and after the first update"
        rows = [
            ("weights", self.weights, by_type),
            *([("second", self.second, "weights of the reference")] if self.second else []),
            ("adapter", self.adapter, "float32"),
            ("optimizer", self.optimizer, f"{self.all_states / GIB:.2f}{later}" if later else ""),
            ("step", self.step, f"gradients and activations: {self.moment}"),
            ("total", self.total, ""),
            *([("host", self.host, "pinned memory")] if self.host else []),
        ]
        device = "one GPU" if self.device == "cuda" else "this CPU"
        batch = f"micro-batch of {self.tokens:,} tokens ({self.stage})"
        head = f"memory on {device}, {batch}, at its worst moment:"
        return [head, *(f"  {n:<12} {s / GIB:8.2f} GiB  {w}".rstrip() for n, s, w in rows)]


def plan_recipe(config: Any, recipe: Recipe, device: Device = "cuda", gpus: int = 1) -> MemoryPlan:
    """:func:`plan_memory` of a recipe and a transformers config."""
    return plan_memory(adapted_meta(config, recipe), recipe, device, gpus)


def adapted_meta(config: Any, recipe: Recipe) -> nn.Module:
    """The whole adapted model on the meta device."""
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models.structure import meta_model

    with torch.device("meta"):
        return add_lora(meta_model(config), recipe.lora, recipe.router.train)


def plainly_fits(config: Any, recipe: Recipe, fixed: int, room: int) -> bool:
    """Whether a rough bound on a step's memory is far below ``room``, so that no plan is needed.

    For each token it counts a dozen copies of the logits, and of each layer a hundred of the hidden
    vector, thirty of the chosen experts' and three rows of the attention matrix, in float32.
    """
    text, shape = config.get_text_config(), step_shape(recipe)
    if shape.generated:
        return False
    width = max(getattr(text, "intermediate_size", 0) or 0, text.hidden_size)
    chosen = (getattr(text, "num_experts_per_tok", None) or 8) * (text.hidden_size + width)
    layer = 100 * text.hidden_size + 30 * chosen + 3 * text.num_attention_heads * shape.length
    numbers = 12 * text.vocab_size + text.num_hidden_layers * layer
    return 2 * fixed + 4 * numbers * shape.rows * shape.length < room


def plan_memory(
    model: nn.Module, recipe: Recipe, device: Device = "cuda", gpus: int = 1
) -> MemoryPlan:
    """Predict the memory of ``recipe`` on one device.

    Args:
        model: the whole adapted model on the meta device.
        device: where it would train; decides what attention keeps and TRL's default for
            checkpointing.
        gpus: number of GPUs that share weights, gradients and states by FSDP2.

    Raises:
        RecipeError: an unknown optimizer, or settings that FSDP2 refuses.
        UnsupportedModelError: the model cannot run on tensors without memory.
    """
    from moe_finetune.moe.layers import causal_lm

    stored, shape = stored_bytes(model, recipe, gpus), step_shape(recipe)
    optimizer, states = _states(recipe, stored)
    on_device = 0 if optimizer.paged else states
    steps = step_peaks(causal_lm(model).config, recipe, device, stored, gpus > 1)
    updating = optimizer.copies * stored.gradients
    moments = [(peak, on_device, name) for name, peak in steps.items() if "strength" not in name]
    moments += [(stored.gradients + updating, on_device, "optimizer step")]
    # The first step has no states yet.
    again = any(
        getattr(options, "every", None) is not None for options in recipe.method.terms.values()
    )
    later = on_device if again else 0
    moments += [(peak, later, name) for name, peak in steps.items() if "strength" in name]
    step, then, moment = max(moments, key=lambda row: row[0] + row[1])
    return MemoryPlan(
        stored.weights,
        _second(recipe, shape, stored),
        stored.adapter,
        then,
        step,
        moment,
        stored.gradients,
        on_device,
        stored.weights_by,
        stored.host + (states if optimizer.paged else 0),
        shape.rows * shape.length,
        shape.text,
        device,
    )


def fixed_bytes(model: nn.Module, recipe: Recipe) -> int:
    """Bytes on the device that do not depend on the batch; see :attr:`MemoryPlan.fixed`."""
    stored = stored_bytes(model, recipe)
    optimizer, states = _states(recipe, stored)
    second = _second(recipe, step_shape(recipe), stored)
    fixed = stored.weights + second + stored.adapter + stored.gradients
    return fixed + (0 if optimizer.paged else states)


def _states(recipe: Recipe, stored: Stored) -> tuple[Any, int]:
    optimizer = optimizer_of(str(recipe.trainer.get("optim", DEFAULT_OPTIMIZER)))
    return optimizer, state_bytes(optimizer, stored.trained)


def _second(recipe: Recipe, shape: StepShape, stored: Stored) -> int:
    item = 4 if recipe.model.dtype == "float32" else 2
    return item * stored.parameters if shape.reference else 0
