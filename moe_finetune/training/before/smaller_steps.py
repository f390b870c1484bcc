"""Changes of a recipe with which a step needs less memory, the least costly first."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, reduce
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.models.config_and_tokenizer import open_config
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.memory.plan import MemoryPlan, plan_recipe
from moe_finetune.training.memory.step_bytes import Device

Change = tuple[dict[str, Any], str]
Line = tuple[str, Any, str]
"""A key of the recipe, its value, and the reason."""

EVALUATED = "trainer.per_device_eval_batch_size"
_CHECKPOINTING = (
    {"trainer.gradient_checkpointing": True},
    "activations are computed twice instead of kept",
)
_ONE_ROW = "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"
_AUTO_RANK = (
    {"lora.parts.experts.rank": "auto"},
    "rank / experts a token, at least 4: smaller factors",
)
_SHORTER = (
    {"data.max_length": 512, "data.overlong": "drop"},
    "longer rows are left out; 'moe-finetune preview' counts them",
)
_FEWER_TOKENS = 256
_SHORTER_COMPLETIONS = "longer prompts are left out, longer completions are cut"
_OFFLOADED = ({"model.offload": "experts"}, "frozen experts wait in the host's memory")
_QUANTIZED = ({"model.quantization": "nf4"}, "frozen weights in 4 bits")


def memory_changes(
    values: dict[str, Any], gib: float, device: Device, user_keys: Collection[str] = ()
) -> tuple[list[Line], bool]:
    """Changes, the least costly first, with which a step of a recipe fits, and whether it does.

    Args:
        values: the recipe, with ``trainer``'s batch size and accumulation.
        gib: memory of the device.
        user_keys: dotted keys that the user has set, which no change touches.
    """
    config, _ = open_config(values["model"]["path"])
    steps = list[Change]()

    @cache
    def plan(count: int) -> MemoryPlan:
        changed = reduce(_with, (change for change, _ in steps[:count]), values)
        return plan_recipe(config, recipe_from_tree(Tree(changed)), device)

    fits_at_rest = plan(0).stored.fixed < plan(0).room(gib)
    smaller = [_one_row(values), _AUTO_RANK, _shorter(values)]
    # TRL recomputes activations on a GPU by default; only a GPU has a host to offload to.
    smaller = [_CHECKPOINTING, *smaller] if device == "cpu" else [*smaller, _OFFLOADED]
    ordered = [*smaller, _QUANTIZED] if fits_at_rest else [_QUANTIZED, *smaller]
    steps += [change for change in ordered if _is_possible(values, change[0], user_keys)]
    first = int(not fits_at_rest and bool(steps))
    count = bisect_left(range(first, len(steps)), True, key=lambda n: plan(n).fits(gib)) + first
    changes = [(key, value, why) for change, why in steps[:count] for key, value in change.items()]
    return changes, plan(count).fits(gib)


def _one_row(values: dict[str, Any]) -> Change:
    trainer = values["trainer"]
    rows = trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"]
    change: dict[str, Any] = dict(zip(_ONE_ROW, (1, rows), strict=True))
    if EVALUATED.split(".")[1] in trainer and values.get("stage") != "grpo":
        change[EVALUATED] = 1
    return change, "one row at a time, as many rows a step"


def _shorter(values: dict[str, Any]) -> Change:
    if values.get("stage") != "grpo":
        return _SHORTER
    change: dict[str, Any] = {"data.max_length": 3 * _FEWER_TOKENS}
    if values["trainer"]["max_completion_length"] > _FEWER_TOKENS:
        change["trainer.max_completion_length"] = _FEWER_TOKENS
    return change, _SHORTER_COMPLETIONS


def _is_possible(
    values: dict[str, Any], change: dict[str, Any], user_keys: Collection[str]
) -> bool:
    """Whether a change leaves the user's keys as they are, and gives a valid recipe."""
    for key in change:
        if any(f"{a}.".startswith(f"{b}.") for k in user_keys for a, b in ((key, k), (k, key))):
            return False
    with suppress(RecipeError):
        recipe_from_tree(Tree(_with(values, change)))
        return True
    return False


def _with(recipe: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``recipe`` with other values, by dotted key."""
    recipe = deepcopy(recipe)
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = recipe
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return recipe


def replaced(lines: Sequence[Line], change: Line) -> list[Line]:
    """``lines`` with the one of a key replaced, or added at the end of its section."""
    key = change[0]
    others = [line for line in lines if not line[0].startswith(f"{key}.")]
    for index, line in enumerate(others):
        if line[0] == key:
            return [*others[:index], change, *others[index + 1 :]]
    section = key.split(".")[0]
    of_section = [i for i, line in enumerate(others) if line[0].split(".")[0] == section]
    end = of_section[-1] + 1 if of_section else len(others)
    return [*others[:end], change, *others[end:]]
