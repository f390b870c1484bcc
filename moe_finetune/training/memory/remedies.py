"""What to change in a recipe that does not fit, in the order in which it costs least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.training.memory.short_model import Device, checkpointing

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

LEAST_LENGTH = 256
LEAST_RANK = 8


@dataclass(frozen=True)
class Remedy:
    """A change, and the bytes that the run needs with it and all before it."""

    change: str
    total: int
    fits: bool


def remedies(recipe: Recipe, device: Device, gpu: int, need: Callable[[Any], int]) -> list[Remedy]:
    """Changes one after the other until the run fits ``gpu`` bytes; the last says whether it does.

    Args:
        gpu: bytes there.
        need: the total of a recipe.
    """
    found: list[Remedy] = []
    skip = ""
    while True:
        for kind, change, tried in _changes(recipe, device):
            if kind in skip.split():
                continue
            total = need(tried)
            if found and total >= found[-1].total:
                skip += f" {kind}"  # it changes nothing here
                continue
            found.append(Remedy(change, total, total <= gpu))
            recipe = tried
            break
        else:
            return found
        if found[-1].fits:
            return found


def _changes(recipe: Recipe, device: Device) -> Iterator[tuple[str, str, Recipe]]:
    """Kind, text and recipe of every change that is left, the cheapest first."""
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
    length = recipe.data.max_length // 2
    if length >= LEAST_LENGTH:
        yield "length", f"data.max_length: {length}", _with(recipe, "data", max_length=length)
    if lora is not None and model.offload == "none":
        for kind in {"none": ("int8", "nf4"), "int8": ("nf4",)}.get(model.quantization, ()):
            yield kind, f"model.quantization: {kind}", _with(recipe, "model", quantization=kind)
    if lora is not None and lora.rank is not None and lora.rank // 2 >= LEAST_RANK:
        rank = lora.rank // 2
        smaller = _with(recipe, "lora", rank=rank, alpha=float(lora.alpha or 0) / 2)
        yield "rank", f"lora.rank: {rank}", smaller
    if lora is not None and len(lora.targets) > 1:
        fewer = [group for group in lora.targets if group == "attention"] or lora.targets[:1]
        change = f"lora.targets: [{', '.join(fewer)}]"
        yield "targets", change, _with(recipe, "lora", targets=fewer)
    if lora is not None and model.offload == "none" and device == "cuda":
        change = "model.offload: experts" + (
            "" if model.quantization == "none" else ", model.quantization: none"
        )
        freed = _with(recipe, "model", offload="experts", quantization="none")
        yield "offload", change, freed


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    held = getattr(recipe, section)
    changed = {**held, **values} if isinstance(held, dict) else held.model_copy(update=values)
    return recipe.model_copy(update={section: changed})
