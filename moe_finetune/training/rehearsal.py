"""A start without weights: build on the meta device what a run builds before its first step.

Model, adapter, trainer's arguments, trainer, optimizer and schedule are made exactly as in the run,
in a temporary folder. No weights are read, and none of the run's files is written. A library's
error is reported here, before the run folder exists, with the recipe key that causes it.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_finetune.errors import MoeFinetuneError, RecipeError, UnsupportedModelError
from moe_finetune.io.terminal import terminal
from moe_finetune.models.structure import class_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks
from moe_finetune.training.memory.plan import Device, fixed_bytes, plainly_fits, plan_memory
from moe_finetune.training.memory.stored import GIB
from moe_finetune.training.run_plan import Plan, machine_room, make_plan

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from moe_finetune.training.start import Start

ROWS = 8
"""Number of rows that the rehearsed trainer gets."""

Built = TypeVar("Built")


def rehearse(
    start: Start,
    train: Dataset,
    validation: Dataset | None,
    ignore_memory: bool = False,
    activations: bool = False,
) -> Plan:
    """Build what the run will build, except weights.

    Args:
        train: examples with ``input_ids``.
        validation: the same, or None.
        ignore_memory: allow a run that exceeds this machine's memory.
        activations: predict a step's memory even if it plainly fits, which takes a few seconds.

    Raises:
        RecipeError: this machine, the model or the trainer rejects a setting; names its key.
    """
    import torch

    from moe_finetune.lora.coverage import lora_coverage
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models import opened_as
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.moe.spread import check_spread
    from moe_finetune.training.rewards import reward_functions

    recipe, tokenizer = start.recipe, start.tokenizer
    # A model notes kernels and dtype in its config, and the run's is the merge's and verify's too.
    config = copy.deepcopy(start.config)
    attention = recipe.model.attn_implementation
    try:
        with torch.device("meta"):
            model: nn.Module = class_of(config).from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
    except (ImportError, ValueError) as error:
        raise RecipeError(
            f"model.attn_implementation: '{attention}' cannot be used here: {_short(error)}; "
            "leave it out"
        ) from error
    opened_as(start.family, model)
    if start.expert_ranks > 1:
        experts = model_facts(model).num_experts
        check_spread(model, experts, start.expert_ranks, ranks.world_size())
    with torch.device("meta"):
        model = add_lora(model, recipe.lora, recipe.router.train)
    coverage = lora_coverage(model)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    fixed, as_long = fixed_bytes(model, recipe), as_long_as(recipe, train)
    memory, unknown, room = None, [], machine_room()
    plain = ranks.world_size() > 1 or plainly_fits(config, as_long, fixed, room)
    if activations or not (plain or fixed > room):
        try:
            with nullcontext() if activations else terminal().phase("plan"):
                memory = plan_memory(model, as_long, device)
        except UnsupportedModelError as error:  # the run needs no plan
            unknown = [str(error)] if activations else []
    plan = make_plan(recipe, coverage, fixed, memory, train, validation)
    plan.remarks.extend(unknown)
    if not ignore_memory:
        _check_memory(plan)
    reward_functions(recipe.rewards, train.column_names)
    # Trainers that hold a second model cannot be built without weights; several processes build
    # theirs together, with the launcher's plugins, once.
    if ranks.world_size() == 1 and STAGES[recipe.stage].form == "tokens":
        _with_culprit(recipe, lambda tried: _build(tried, model, tokenizer, train, validation))
    return plan


def check_arguments(recipe: Recipe) -> None:
    """Build the trainer's arguments, which needs neither model nor data.

    Raises:
        RecipeError: transformers or TRL rejects a key under ``trainer:``.
    """
    from moe_finetune.training.trainer import training_arguments

    with tempfile.TemporaryDirectory() as folder:
        _with_culprit(recipe, lambda tried: training_arguments(tried, Path(folder)))


def as_long_as(recipe: Recipe, train: Dataset) -> Recipe:
    """``recipe`` with ``data.max_length`` lowered to its longest row, unless rows are packed."""
    if recipe.data.packing or "input_ids" not in train.column_names or not len(train):
        return recipe
    import pyarrow.compute as pc

    longest = pc.max(pc.list_value_length(train.data.column("input_ids"))).as_py()
    data = recipe.data.model_copy(update={"max_length": min(longest, recipe.data.max_length)})
    return recipe.model_copy(update={"data": data})


def _check_memory(plan: Plan) -> None:
    if plan.fixed > plan.machine:
        raise RecipeError(
            f"the run needs {plan.fixed / GIB:.1f} GiB for weights, adapter and optimizer, but "
            f"this machine has {plan.machine / GIB:.1f} GiB;\nlower lora.rank, choose fewer "
            "lora.targets, or take more devices; where weights are offloaded, --ignore-memory "
            "starts it anyway"
        )
    if plan.memory is not None and ranks.world_size() == 1 and plan.memory.total > machine_room():
        lines = [*plan.memory.lines(), plan.memory.verdict(plan.machine / GIB)]
        raise RecipeError("\n".join([*lines, "--ignore-memory starts the run anyway"]))


def _with_culprit(recipe: Recipe, build: Callable[[Recipe], Built]) -> Built:
    """Return ``build(recipe)``; add the trainer's key that causes it to a library's error.

    The cause is the key without which the build succeeds.
    """
    try:
        return build(recipe)
    except MoeFinetuneError:
        raise
    except Exception as error:
        for name, value in recipe.trainer.items():
            others = {key: other for key, other in recipe.trainer.items() if key != name}
            try:
                build(recipe.model_copy(update={"trainer": others}))
            except Exception:  # still refused: another key is to blame
                continue
            raise RecipeError(
                f"trainer.{name}: {value!r} cannot be used here: {_short(error)}; change it or "
                "leave it out"
            ) from error
        raise RecipeError(f"trainer: cannot be used here: {_short(error)}") from error


def _short(error: Exception) -> str:
    """An error's message in one line, or the name of its type."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _build(
    recipe: Recipe, model: nn.Module, tokenizer: Any, train: Dataset, validation: Dataset | None
) -> None:
    """Build the trainer with optimizer, schedule and first data loader, on a few rows."""
    from moe_finetune.training.trainer import build_trainer

    few = [None if rows is None else rows.select(range(min(ROWS, len(rows))))
           for rows in (train, validation)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, _quiet():
        trainer, _ = build_trainer(recipe, Path(folder), model, tokenizer, few[0], few[1])
        trainer.get_train_dataloader()
        trainer.create_optimizer_and_scheduler(num_training_steps=2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and warnings that the run will show again."""
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    hidden, level = are_progress_bars_disabled(), logging.root.manager.disable
    disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        if not hidden:
            enable_progress_bars()
