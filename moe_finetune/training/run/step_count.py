"""How many steps a run has, how large each is, and how many training states lie on the disk."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.io.counted import counted
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "dataloader_drop_last": False,
}
"""TRL's, of the fields that decide the number of steps; a test compares them with its classes."""


def step_arguments(trainer: Mapping[str, Any]) -> Any:
    """What :func:`describe_steps` reads of the trainer's arguments, without importing TRL.

    For rows of tokens; those of prompts need TRL's own class.
    """
    return SimpleNamespace(**{key: trainer.get(key, value) for key, value in DEFAULTS.items()})


def count_steps(recipe: Recipe, arguments: Any, rows: int, tokens: int) -> tuple[int, int]:
    """Sequences per step, and number of steps; packed rows are counted as full."""
    device_batch = arguments.per_device_train_batch_size * ranks.world_size()
    accumulation = arguments.gradient_accumulation_steps
    steps = arguments.max_steps
    if steps <= 0:
        an_epoch = math.ceil(count_batches(recipe, arguments, rows, tokens) / accumulation)
        steps = math.ceil(arguments.num_train_epochs * an_epoch)
    return device_batch * accumulation, steps


def count_batches(recipe: Recipe, arguments: Any, rows: int, tokens: int) -> int:
    """Batches of each device in an epoch: what the trainer's loader yields."""
    if STAGES[recipe.stage].form == "prompts":
        prompts = arguments.generation_batch_size // arguments.num_generations
        # TRL's sampler drops the prompts that do not fill a generation batch.
        return rows // prompts * arguments.steps_per_generation * arguments.num_iterations
    sequences = math.ceil(tokens / recipe.data.max_length) if recipe.data.packing else rows
    batches = sequences / (arguments.per_device_train_batch_size * ranks.world_size())
    return math.floor(batches) if arguments.dataloader_drop_last else math.ceil(batches)


def check_batches(recipe: Recipe, arguments: Any, rows: int, tokens: int) -> None:
    """Refuse a run whose loader would be empty: it would train nothing."""
    if count_batches(recipe, arguments, rows, tokens):
        return
    key, sequences = "trainer.dataloader_drop_last", counted(rows, "training row")
    if STAGES[recipe.stage].form == "prompts":
        prompts = arguments.generation_batch_size // arguments.num_generations
        raise RecipeError(
            f"trainer.generation_batch_size: one generation takes {prompts} prompts, but there are "
            f"{sequences}, so nothing would train; lower trainer.per_device_train_batch_size or "
            "trainer.gradient_accumulation_steps, or give more rows"
        )
    batch = arguments.per_device_train_batch_size * ranks.world_size()
    raise RecipeError(
        f"{key}: {sequences} do not fill one batch of {batch}, so nothing would train; leave it "
        "out, or lower trainer.per_device_train_batch_size"
    )


def describe_steps(recipe: Recipe, arguments: Any, rows: int, tokens: int | None) -> str:
    """One line with the number of steps and the size of one."""
    batch, steps = count_steps(recipe, arguments, rows, tokens or 0)
    count = f"{counted(steps, 'step')} of"
    if tokens is None:
        group = getattr(arguments, "num_generations", 0)
        unit = f"{counted(batch, 'completion')}, {group} of a prompt" if group else ""
        return f"{count} {unit or counted(batch, 'row')}"
    if recipe.data.packing:
        size = batch * recipe.data.max_length
        packed = counted(batch, "packed sequence")
        return f"about {count} {packed}, about {size:,} tokens a step"
    batch = min(batch, rows)  # a step ends with the epoch
    return f"{count} {counted(batch, 'sequence')}, about {batch * tokens / rows:,.0f} tokens a step"


def checkpoints_at_once(trainer: dict[str, Any], steps: int) -> int:
    """How many lie on the disk at once: one more than are kept, while the next is written."""
    if trainer.get("save_strategy") == "no":
        return 0
    interval = float(trainer.get("save_steps", 500))
    interval = interval if interval >= 1 else interval * steps
    written = max(1, int(steps // max(interval, 1)))
    return min(written, int(trainer.get("save_total_limit", 2) or written) + 1)
