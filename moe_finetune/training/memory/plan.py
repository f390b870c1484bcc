"""The memory of a run on one device: weights, optimizer states, and a step's peak.

Memory grows layer by layer in the forward, peaks at the head, and shrinks in the backward while
gradients are added. The plan goes through these moments with the bytes from :mod:`.profile` and
takes the peak. With several GPUs, which share the weights by FSDP2, it is the plan of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import RecipeError
from moe_finetune.training.memory.optimizers import (
    DEFAULT_OPTIMIZER,
    optimizer_of,
    state_bytes,
    step_bytes,
)
from moe_finetune.training.memory.profile import StepProfile, step_profile
from moe_finetune.training.memory.short_model import Device
from moe_finetune.training.memory.stage import StepShape, second_model_bytes, step_shape
from moe_finetune.training.memory.weights import Weights, is_added, weights_of

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe

GIB = 2**30
Profiles = dict[str, StepProfile]
Moment = tuple[int, int, int, str]  # gradients, kept, needed, which


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device; ``total`` is the sum of the parts up to ``needed``.

    Attributes:
        weights: as stored on the device; ``weights_by`` dtype or quantization, offloaded ones
            included.
        adapter: LoRA factors and copies of routers, float32.
        optimizer: states at the peak; ``all_states`` once they exist, after the first update.
        gradients: float32, at the peak; ``all_gradients`` once all exist.
        kept: what the layers keep for their backward, at the peak.
        needed: working memory of one layer or the head at the peak.
        moment: when the peak occurs.
        losses: part of ``total`` that the method's losses and records take.
        host: bytes in the host's pinned memory, or shared with it.
        tokens: tokens of a micro-batch.
        head: working memory of head and loss.
        second: bytes of a reference's weights.
        stage: description of the stage's micro-batch.
        device: what the plan is for.
    """

    weights: int
    adapter: int
    optimizer: int
    gradients: int
    kept: int
    needed: int
    moment: str
    all_gradients: int
    tokens: int
    weights_by: dict[str, int] = field(default_factory=dict)
    losses: int = 0
    host: int = 0
    head: int = 0
    second: int = 0
    stage: str = ""
    all_states: int = 0
    device: Device = "cuda"

    @property
    def total(self) -> int:
        """Peak bytes."""
        stored = self.weights + self.second + self.adapter + self.optimizer
        return stored + self.gradients + self.kept + self.needed

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch: weights, adapter, gradients and states."""
        return self.weights + self.second + self.adapter + self.all_states + self.all_gradients

    @property
    def activations(self) -> int:
        return self.total - self.fixed

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "activations": self.activations}


def plan_memory(
    model: nn.Module,
    recipe: Recipe,
    device: Device = "cuda",
    with_losses: bool = False,
    gpus: int = 1,
    profiles: Profiles | None = None,
) -> MemoryPlan:
    """Predict the memory of ``recipe`` on one device.

    Args:
        model: the whole adapted model on the meta device.
        with_losses: also compute the share of the method's losses, which takes a second profile.
        gpus: number of GPUs that share weights, gradients and states by FSDP2.
        profiles: cache of this model's earlier profiles; new ones are added.

    Raises:
        RecipeError: an unknown optimizer, or settings that FSDP2 refuses.
        UnsupportedModelError: the model cannot run on tensors without memory.
    """
    from moe_finetune.moe.layers import causal_lm

    weights = weights_of(model, recipe)
    if gpus > 1:
        _refuse_unsharded(recipe)
        weights = weights.sharded(gpus)
    config, kinds = causal_lm(model).config, layer_kinds(model)
    key = _profiled(recipe)
    profiles = {} if profiles is None else profiles
    if key not in profiles:
        profiles[key] = step_profile(config, kinds, recipe, device)
    profile = profiles[key]
    plan = put_together(weights, profile, recipe, device)
    if with_losses and (recipe.method.terms or recipe.method.perturbations):
        without = step_profile(config, kinds, recipe, device, losses=False)
        plain = put_together(weights, without, recipe, device)
        plan = replace(plan, losses=plan.total - plain.total)
    return plan


def _profiled(recipe: Recipe) -> str:
    """Key of the recipe's settings that its profile depends on; storage of weights is not one."""
    stored = {"model": {"quantization", "offload"}, "trainer": {"optim"}}
    return recipe.model_dump_json(exclude=stored)


def _refuse_unsharded(recipe: Recipe) -> None:
    settings = {
        f"model.offload: {recipe.model.offload}": recipe.model.offload != "none",
        f"parallel.experts: {recipe.parallel.experts}": recipe.parallel.experts != 1,
    }
    for setting, used in settings.items():
        if used:
            raise RecipeError(
                f"{setting} is not counted for several GPUs with FSDP2; leave it out, or plan for "
                "one GPU"
            )


def _step(
    weights: Weights, profile: StepProfile, recipe: Recipe, gradients: int, full: bool
) -> Iterator[Moment]:
    opened, activations = weights.opened, profile.before
    for index, layer in enumerate(profile.layers):
        yield gradients, activations, layer.forward + opened, f"forward of layer {index}"
        activations += layer.kept
    if recipe.trainer.get("activation_offloading"):
        # All but the layers in transit are in the host's memory.
        activations = profile.before + sum(sorted(layer.kept for layer in profile.layers)[-2:])
    yield gradients, activations, profile.head, "head and loss"
    activations += profile.after_head
    gradients += 0 if full else weights.other_gradients
    for index in reversed(range(len(profile.layers))):
        layer = profile.layers[index]
        yield gradients, activations, layer.backward + opened, f"backward of layer {index}"
        activations = max(activations - layer.released, 0)
        gradients += 0 if full else weights.layer_gradients[index]


def _strength(
    weights: Weights,
    profile: StepProfile,
    recipe: Recipe,
    device: Device,
    gradients: int,
    later: bool,
) -> Iterator[Moment]:
    """The moments of a step whose losses' strength is measured.

    Between the head's backward and the layers', each loss runs one backward over a retained graph.
    The resulting gradients of routers and routed experts stay until the step ends, in the host's
    memory if they would take more than the weights.

    Args:
        gradients: bytes of gradients from earlier micro-batches of the window.
        later: whether earlier micro-batches exist, which also left measured gradients.
    """
    count = len(recipe.method.terms) + 1
    measured = weights.measured_gradients * count
    if device == "cuda" and measured // 4 > weights.parameters:
        measured = 0  # they leave the device
    activations = profile.before + profile.after_head + sum(layer.kept for layer in profile.layers)
    needed = max(layer.backward for layer in profile.layers) + weights.opened
    head = 0 if later else weights.other_gradients
    moments = [(gradients + head, activations, needed, "backward of one of them")]
    for moment in _step(weights, profile, recipe, gradients, later):
        # Before the step's first backward nothing is measured yet.
        if later or moment[-1].startswith("backward"):
            moments.append(moment)
    for present, activations, needed, name in moments:
        yield present + measured, activations, needed, f"measuring the losses' strength, {name}"


def _without_gradients(
    weights: Weights, profile: StepProfile, shape: StepShape, gradients: int
) -> Iterator[Moment]:
    """The moments of a stage's forwards without gradients."""
    layer = max(layer.forward for layer in profile.layers) + weights.opened
    if shape.concurrent:
        activations = profile.before + sum(layer.kept for layer in profile.layers)
        yield gradients, activations, layer, "forward of the reference"
    if shape.generated:
        tokens = shape.length
        by_layer = [shape.generated * (fixed + token * tokens) for fixed, token in profile.cache]
        # A layer's keys and values lie there twice while a token is added to them.
        cache = sum(by_layer) + max(by_layer)
        prompts = layer * shape.generated * shape.prompt // (shape.rows * shape.length)
        yield 0, cache, prompts, f"generating {shape.generated} rows of {tokens} tokens"


def fixed_bytes(model: nn.Module, recipe: Recipe) -> int:
    """Bytes on the device that do not depend on the batch; see :attr:`MemoryPlan.fixed`."""
    weights = weights_of(model, recipe)
    optimizer = optimizer_of(str(recipe.trainer.get("optim", DEFAULT_OPTIMIZER)))
    states = 0 if optimizer.paged else state_bytes(optimizer, weights.trained)
    gradients = sum(weights.layer_gradients) + weights.other_gradients
    second = second_model_bytes(recipe, step_shape(recipe), weights.parameters)
    return weights.device + second + weights.added + states + gradients


def layer_kinds(model: nn.Module) -> list[Any]:
    """A key for each decoder layer, equal for layers that compute alike."""
    from moe_finetune.moe.layers import backbone_of

    backbone: Any = backbone_of(model)
    types = getattr(backbone.config, "layer_types", None)
    shapes: list[list[Any]] = [[] for _ in backbone.layers]
    for index, layer in enumerate(backbone.layers):
        shapes[index] = [
            (name, tuple(p.shape))
            for name, p in layer.named_parameters()
            if not is_added(f".{name}")
        ]
        shapes[index].append(types[index] if types else None)
    return shapes


def put_together(
    weights: Weights, profile: StepProfile, recipe: Recipe, device: Device = "cuda"
) -> MemoryPlan:
    """Go through the moments of a step and take the peak."""
    trainer = recipe.trainer
    optimizer = optimizer_of(str(trainer.get("optim", DEFAULT_OPTIMIZER)))
    states = state_bytes(optimizer, weights.trained)
    all_gradients = sum(weights.layer_gradients) + weights.other_gradients
    accumulates = int(trainer.get("gradient_accumulation_steps", 1)) > 1
    shape = step_shape(recipe)
    # In a window's later micro-batches the gradients are there from the beginning.
    gradients = all_gradients if accumulates else 0
    moments = list(_step(weights, profile, recipe, gradients, accumulates))
    moments += _without_gradients(weights, profile, shape, gradients)
    moments.append((all_gradients, 0, step_bytes(optimizer, weights.trained), "optimizer step"))
    stored = 0 if optimizer.paged else states
    with_states = [(moment, stored) for moment in moments]
    if _is_measured(recipe):
        # The first step has no states yet.
        then = stored if _is_measured_again(recipe) else 0
        measured = _strength(weights, profile, recipe, device, gradients, accumulates)
        with_states += [(moment, then) for moment in measured]
    worst, optimizer_bytes = max(with_states, key=lambda pair: sum(pair[0][:3]) + pair[1])
    gradients, activations, needed, moment = worst
    return MemoryPlan(
        weights=weights.device,
        adapter=weights.added,
        optimizer=optimizer_bytes,
        gradients=gradients,
        kept=activations,
        needed=needed,
        moment=moment,
        all_gradients=all_gradients,
        tokens=shape.rows * shape.length,
        weights_by=weights.by_type,
        host=weights.host + (states if optimizer.paged else 0),
        head=profile.head,
        second=second_model_bytes(recipe, shape, weights.parameters),
        stage=shape.text,
        device=device,
        all_states=stored,
    )


def _is_measured(recipe: Recipe) -> bool:
    """Whether the first step measures the losses' strength."""
    terms: list[Any] = list(recipe.method.terms.values())
    shares = any(options.share is not None for options in terms)
    return bool(terms) and (recipe.method.strength.first or shares)


def _is_measured_again(recipe: Recipe) -> bool:
    terms: list[Any] = list(recipe.method.terms.values())
    return any(options.every is not None for options in terms)
