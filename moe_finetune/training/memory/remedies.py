"""Changes for a recipe that does not fit, the least costly first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.training.memory.optimizers import DEFAULT_OPTIMIZER
from moe_finetune.training.memory.short_model import Device, checkpointing

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

_IN_32_BITS = (DEFAULT_OPTIMIZER, "adamw_torch")
LEAST_LENGTH = 256
LEAST_RANK = 8


@dataclass(frozen=True)
class Remedy:
    """A change, and the bytes that the run needs with it and all earlier ones."""

    change: str
    total: int
    fits: bool


Need = Callable[[Any], int]


def remedies(
    recipe: Recipe, device: Device, room: int, need: Need, sharded: bool = False
) -> list[Remedy]:
    """Apply changes one after another until the run fits; the last shows whether it does.

    A change that later, costlier ones make unnecessary is dropped.

    Args:
        room: bytes available for tensors on the device.
        need: returns a recipe's total bytes.
        sharded: whether several GPUs share the weights by FSDP2, which rules out offloading.
    """
    without = {"offload"} if sharded else set()
    changes = _until_it_fits(recipe, device, room, need, without)
    if not changes[-1:] or not changes[-1][1].fits:
        return [change for _, change in changes]
    for kind in reversed(list(dict.fromkeys(kind for kind, _ in changes))):
        steps = [step for step, _ in changes if step != kind]
        shorter = list(_taken(recipe, device, room, need, steps))
        if len(shorter) == len(steps) and shorter[-1:] and shorter[-1][1].fits:
            changes = shorter
    return [change for _, change in changes]


def _until_it_fits(
    recipe: Recipe, device: Device, room: int, need: Need, without: set[str]
) -> list[tuple[str, Remedy]]:
    changes: list[tuple[str, Remedy]] = []
    while not changes or not changes[-1][1].fits:
        for kind, change, tried in _changes(recipe, device):
            if kind in without:
                continue
            total = need(tried)
            if changes and total >= changes[-1][1].total:
                without = without | {kind}  # it changes nothing here
                continue
            changes.append((kind, Remedy(change, total, total <= room)))
            recipe = tried
            break
        else:
            return changes
    return changes


def _taken(
    recipe: Recipe, device: Device, room: int, need: Need, steps: list[str]
) -> Iterator[tuple[str, Remedy]]:
    """The changes of these kinds, each applied after those before it if possible."""
    for step in steps:
        choice = next((row for row in _changes(recipe, device) if row[0] == step), None)
        if choice is None:
            return
        kind, change, recipe = choice
        total = need(recipe)
        yield kind, Remedy(change, total, total <= room)


def _changes(recipe: Recipe, device: Device) -> Iterator[tuple[str, str, Recipe]]:
    """Kind, text and recipe of every remaining change, the cheapest first."""
    trainer, lora, model = recipe.trainer, recipe.lora, recipe.model
    if not checkpointing(recipe, device):
        yield (
            "checkpointing",
            "trainer.gradient_checkpointing: true",
            _with(recipe, "trainer", gradient_checkpointing=True),
        )
    batch = int(trainer.get("per_device_train_batch_size", 8))
    if batch > 1:
        rows = batch // 2
        window = int(trainer.get("gradient_accumulation_steps", 1)) * batch // rows
        yield (
            "batch",
            f"trainer.per_device_train_batch_size: {rows}, gradient_accumulation_steps: {window}",
            _with(
                recipe,
                "trainer",
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=window,
            ),
        )
    if device == "cuda" and trainer.get("optim", DEFAULT_OPTIMIZER) in _IN_32_BITS:
        yield "optim", "trainer.optim: adamw_8bit", _with(recipe, "trainer", optim="adamw_8bit")
    if lora is not None and model.offload == "none":
        for kind in {"none": ("int8", "nf4"), "int8": ("nf4",)}.get(model.quantization, ()):
            yield kind, f"model.quantization: {kind}", _with(recipe, "model", quantization=kind)
    length = recipe.data.max_length // 2
    if length >= LEAST_LENGTH:
        yield "length", f"data.max_length: {length}", _with(recipe, "data", max_length=length)
    if lora is not None and lora.rank is not None and lora.rank // 2 >= LEAST_RANK:
        rank = lora.rank // 2
        smaller = _with(recipe, "lora", rank=rank, alpha=float(lora.alpha or 0) / 2)
        yield "rank", f"lora.rank: {rank}", smaller
    if lora is not None and len(lora.targets) > 1:
        fewer = [group for group in lora.targets if group == "attention"] or lora.targets[:1]
        change = f"lora.targets: [{', '.join(fewer)}]"
        yield "targets", change, _with(recipe, "lora", targets=fewer)
    if lora is not None and model.offload == "none" and device == "cuda":
        yield "offload", "model.offload: experts", _with(recipe, "model", offload="experts")


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    section_values = getattr(recipe, section)
    changed = (
        {**section_values, **values}
        if isinstance(section_values, dict)
        else section_values.model_copy(update=values)
    )
    return recipe.model_copy(update={section: changed})
