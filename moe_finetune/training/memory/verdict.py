"""Whether a recipe fits a GPU of a given size, and what would make it fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.training.memory.plan import GIB, MemoryPlan, Profiles, plan_memory
from moe_finetune.training.memory.remedies import Remedy, remedies
from moe_finetune.training.memory.short_model import Device
from moe_finetune.training.memory.stage import step_shape

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe

RESERVED = 0.06
"""Share of a GPU's memory that is unavailable to tensors: CUDA's context, kernels' workspaces,
fragmentation. An assumption; ``make gpu-check`` measures it."""


@dataclass(frozen=True)
class Verdict:
    """The predicted and the available memory.

    Attributes:
        room: bytes available for tensors.
        changes: successive changes for a run that does not fit.
    """

    plan: MemoryPlan
    gpu: int
    room: int
    changes: list[Remedy]

    @property
    def fits(self) -> bool:
        return self.plan.total <= self.room

    def to_mapping(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "gpu": self.gpu,
            "room": self.room,
            "memory": self.plan.to_mapping(),
            "changes": [asdict(change) for change in self.changes],
        }

    def text(self) -> str:
        room = f"{self.room / GIB:.1f} of {self.gpu / GIB:.1f} GiB"
        need = f"{self.plan.total / GIB:.1f} GiB"
        lines = [*memory_lines(self.plan), ""]
        if self.fits:
            return "\n".join([*lines, f"fits: needs {need}; {room} are for tensors"])
        lines.append(f"does not fit: needs {need}; {room} are for tensors")
        if self.changes:
            lines.append("change, one after the other:")
        for change in self.changes:
            mark = "  fits" if change.fits else ""
            lines.append(f"  {change.total / GIB:8.2f} GiB  {change.change}{mark}")
        if not self.changes or not self.changes[-1].fits:
            lines.append("no change makes it fit; shard it over more GPUs (--gpus, FSDP2)")
        return "\n".join(lines)


def judge(
    config: Any, recipe: Recipe, gpu_gib: float, device: Device = "cuda", gpus: int = 1
) -> Verdict:
    """Plan ``recipe`` for a GPU of ``gpu_gib`` GiB.

    Args:
        gpu_gib: the GPU's nominal memory in GiB.
        gpus: number of GPUs that share the weights by FSDP2; the verdict applies to each.

    Raises:
        RecipeError: see :func:`~moe_finetune.training.memory.plan.plan_memory`.
    """
    gpu = round(gpu_gib * GIB)
    room = round(gpu * (1 - RESERVED))
    profiles: Profiles = {}
    plan = plan_recipe(config, recipe, device, True, gpus, profiles)
    changes: list[Remedy] = []
    if plan.total > room:
        changes = remedies(
            recipe,
            device,
            room,
            lambda tried: plan_recipe(config, tried, device, False, gpus, profiles).total,
            sharded=gpus > 1,
        )
    return Verdict(plan, gpu, room, changes)


def plan_recipe(
    config: Any,
    recipe: Recipe,
    device: Device = "cuda",
    with_losses: bool = False,
    gpus: int = 1,
    profiles: Profiles | None = None,
) -> MemoryPlan:
    """Call :func:`~moe_finetune.training.memory.plan.plan_memory` for a recipe and a config."""
    model = adapted_meta(config, recipe)
    return plan_memory(model, recipe, device, with_losses, gpus, profiles)


def adapted_meta(config: Any, recipe: Recipe) -> nn.Module:
    """The whole adapted model on the meta device."""
    import torch

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


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The plan as lines of a text table."""
    stored = ", ".join(f"{size / GIB:.2f} {name}" for name, size in plan.weights_by.items())
    rows = [
        ("weights", plan.weights, stored),
        *([("second", plan.second, "weights of the reference")] if plan.second else []),
        ("adapter", plan.adapter, "float32"),
        ("optimizer", plan.optimizer, _states(plan)),
        ("gradients", plan.gradients, f"then; {plan.all_gradients / GIB:.2f} when all are there"),
        ("kept", plan.kept, "of the layers, for their backward"),
        ("needed", plan.needed, f"for a moment: {plan.moment}"),
    ]
    device = "one GPU" if plan.device == "cuda" else "this CPU"
    lines = [
        f"memory on {device}, micro-batch of {plan.tokens:,} tokens ({plan.stage}), at its worst "
        "moment:"
    ]
    lines += [f"  {name:<12} {size / GIB:8.2f} GiB  {what}".rstrip() for name, size, what in rows]
    lines.append(f"  {'total':<12} {plan.total / GIB:8.2f} GiB")
    if plan.losses:
        lines.append(f"  {'of which':<12} {plan.losses / GIB:8.2f} GiB  losses and records")
    if plan.host:
        lines.append(f"  {'host':<12} {plan.host / GIB:8.2f} GiB  pinned memory")
    return lines


def _states(plan: MemoryPlan) -> str:
    if plan.optimizer == plan.all_states:
        return "states"
    return f"states then; {plan.all_states / GIB:.2f} after the first step"
