"""A start without weights: what a run builds before its first step, built on the meta device.

The model's shapes, its adapter, the trainer's arguments, trainer, optimizer and schedule are made
exactly as the run makes them, in a temporary folder; no weight is read and no file of the run
is written. What a library refuses is reported here, before the run's folder exists, with the key
that it is about.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_finetune.errors import MoeFinetuneError, RecipeError
from moe_finetune.models.structure import class_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks
from moe_finetune.training.memory.plan import GIB, MemoryPlan, fixed_bytes, plan_memory
from moe_finetune.training.memory.short_model import Device
from moe_finetune.training.memory.verdict import memory_lines

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from moe_finetune.lora.coverage import Coverage
    from moe_finetune.training.start import Start

ROWS = 8
"""Rows of the data that the rehearsed trainer gets."""

Built = TypeVar("Built")


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        stage: of the training.
        method: the preset's name, or "no preset"; terms: its losses.
        coverage: what LoRA reaches and what trains.
        fixed: bytes that no batch size changes: weights, adapter, gradients and moments.
        memory: of one device without sharding, where it was asked for.
        machine: bytes that this run's devices have together.
        rows, tokens: of the training data, tokens where they are known; validation: its rows, or
            None.
        batch: sequences of an optimizer step over all processes.
        steps: optimizer steps; about as many, where rows are packed.
        packed: whether they are.
        remarks: settings that do nothing in a run of this length.
    """

    stage: str
    method: str
    terms: list[str]
    coverage: Coverage
    fixed: int
    memory: MemoryPlan | None
    machine: int
    rows: int
    tokens: int | None
    validation: int | None
    batch: int
    steps: int
    packed: bool
    remarks: list[str]
    opening: str

    def text(self) -> str:
        losses = f" ({', '.join(self.terms)})" if self.terms else ""
        validation = "none" if self.validation is None else f"{self.validation:,} rows"
        about = "about " if self.packed else ""
        return "\n".join(
            [
                self.coverage.table(),
                "",
                *(memory_lines(self.memory) if self.memory is not None else []),
                f"  {'machine':<12} {self.machine / GIB:8.2f} GiB",
                "",
                f"stage          {self.stage}",
                f"method         {self.method}{losses}",
                f"training data  {self.rows:,} rows"
                + ("" if self.tokens is None else f", {self.tokens:,} tokens")
                + (", packed" if self.packed else ""),
                f"validation     {validation}",
                f"steps          {about}{self.steps:,}, of {self.batch} sequences",
                *(f"note: {remark}" for remark in self.remarks),
            ]
        )


def rehearse(
    start: Start,
    train: Dataset,
    validation: Dataset | None,
    ignore_memory: bool = False,
    activations: bool = False,
) -> Plan:
    """Build what the run will build, but for weights.

    Args:
        train: examples with ``input_ids``.
        validation: such examples or None.
        ignore_memory: allow a run that cannot fit into this machine, however small its batches.
        activations: also compute what a step needs, which takes a few seconds.

    Raises:
        RecipeError: a setting that this machine, the model or the trainer refuses, by its key.
    """
    import torch

    from moe_finetune.lora.coverage import lora_coverage
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.moe.spread_loading import check_spread

    recipe, config, tokenizer = start.recipe, start.config, start.tokenizer
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
    if start.expert_ranks > 1:
        experts = model_facts(model).num_experts
        check_spread(model, experts, start.expert_ranks, ranks.world_size())
    with torch.device("meta"):
        model = add_lora(model, recipe.lora, recipe.router.train)
    coverage = lora_coverage(model)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = plan_memory(model, recipe, device) if activations else None
    plan = _plan(recipe, coverage, fixed_bytes(model, recipe), memory, train, validation)
    if not ignore_memory:
        _check_memory(plan)
    _check_second(start, train)
    # Trainers that hold a second model cannot be built without weights; several processes build
    # theirs together, with the launcher's plugins, once.
    if ranks.world_size() == 1 and STAGES[recipe.stage].form == "tokens":
        _with_culprit(recipe, lambda tried: _build(tried, model, tokenizer, train, validation))
    return plan


def _check_second(start: Start, train: Dataset) -> None:
    """Rewards that the rows fit, and a teacher that has the model's vocabulary."""
    from moe_finetune.training.rewards import reward_functions

    recipe = start.recipe
    reward_functions(recipe.rewards, train.column_names)
    if recipe.teacher is not None:
        teacher_size, ours = (
            config.get_text_config().vocab_size for config in (start.teacher_config, start.config)
        )
        if teacher_size != ours:
            raise RecipeError(
                f"teacher: {recipe.teacher} has a vocabulary of {teacher_size} tokens and the "
                f"model one of {ours}; their distributions cannot be compared"
            )


def check_arguments(recipe: Recipe) -> None:
    """Make the trainer's arguments, which needs neither model nor data.

    Raises:
        RecipeError: the key under ``trainer:`` that transformers or TRL refuses.
    """
    from moe_finetune.training.trainer import training_arguments

    with tempfile.TemporaryDirectory() as folder:
        _with_culprit(recipe, lambda tried: training_arguments(tried, Path(folder)))


def _check_memory(plan: Plan) -> None:
    if plan.fixed > plan.machine:
        raise RecipeError(
            f"the run needs {plan.fixed / GIB:.1f} GiB for weights, adapter and optimizer "
            f"alone, and this machine has {plan.machine / GIB:.1f} GiB;\n"
            "lower lora.rank, choose fewer lora.targets, or take more devices; where "
            "weights are offloaded, --ignore-memory starts it anyway"
        )


def _with_culprit(recipe: Recipe, build: Callable[[Recipe], Built]) -> Built:
    """``build(recipe)``; an error of a library names the trainer's key that causes it.

    The key is the one without which the same can be built.
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
    """An error's message in one line, or its type's name."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _build(
    recipe: Recipe, model: nn.Module, tokenizer: Any, train: Dataset, validation: Dataset | None
) -> None:
    """The trainer with its optimizer, schedule and first loader, on a few rows."""
    from moe_finetune.training.trainer import build_trainer

    few = [None if rows is None else rows.select(range(min(ROWS, len(rows))))
           for rows in (train, validation)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, _quiet():
        trainer, _ = build_trainer(recipe, Path(folder), model, tokenizer, few[0], few[1])
        trainer.get_train_dataloader()
        trainer.create_optimizer_and_scheduler(num_training_steps=2)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of what the run will say again."""
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


def _plan(
    recipe: Recipe,
    coverage: Coverage,
    fixed: int,
    memory: MemoryPlan | None,
    train: Dataset,
    validation: Dataset | None,
) -> Plan:
    import pyarrow.compute as pc

    from moe_finetune.training.trainer import training_arguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(recipe, Path(folder))
    # From the offsets of the mapped file, whose rows may be many; shuffled or not, all count.
    tokens = None
    if "input_ids" in train.column_names:
        tokens = pc.sum(pc.list_value_length(train.data.column("input_ids"))).as_py()
    batch, steps = count_steps(recipe, arguments, len(train), tokens or 0)
    return Plan(
        stage=recipe.stage,
        method=recipe.method.preset or "no preset",
        terms=list(recipe.method.terms),
        coverage=coverage,
        fixed=fixed,
        memory=memory,
        machine=_machine(),
        rows=len(train),
        tokens=tokens,
        validation=None if validation is None else len(validation),
        batch=batch,
        steps=steps,
        packed=recipe.data.packing,
        remarks=list(_remarks(recipe, arguments, steps, validation is not None)),
        opening=describe_steps(recipe, arguments, len(train), tokens),
    )


def count_steps(recipe: Recipe, arguments: Any, rows: int, tokens: int) -> tuple[int, int]:
    """Sequences that a step takes, and steps; with packing, rows are counted as if full."""
    sequences = math.ceil(tokens / recipe.data.max_length) if recipe.data.packing else rows
    sequences *= getattr(arguments, "num_generations", 1)
    device_batch = arguments.per_device_train_batch_size * ranks.world_size()
    accumulation = arguments.gradient_accumulation_steps
    steps = arguments.max_steps
    if steps <= 0:
        an_epoch = math.ceil(math.ceil(sequences / device_batch) / accumulation)
        steps = math.ceil(arguments.num_train_epochs * an_epoch)
    return device_batch * accumulation, steps


def describe_steps(recipe: Recipe, arguments: Any, rows: int, tokens: int | None) -> str:
    """Steps and what one takes, as a line: with the rows' own the first that a run says.

    Args:
        tokens: of them; None where the stage's trainer tokenizes.
    """
    batch, steps = count_steps(recipe, arguments, rows, tokens or 0)
    count = f"{steps:,} step{'' if steps == 1 else 's'} of"
    if tokens is None:
        group = getattr(arguments, "num_generations", 0)
        unit = f"completions, {group} of a prompt" if group else "rows"
        return f"{count} {batch} {unit}"
    if recipe.data.packing:
        size = batch * recipe.data.max_length
        return f"about {count} {batch} packed sequences, about {size:,} tokens a step"
    batch = min(batch, rows)  # a step ends with the epoch
    unit = "sequence" if batch == 1 else "sequences"
    return f"{count} {batch} {unit}, about {batch * tokens / rows:,.0f} tokens a step"


def _machine() -> int:
    """Bytes of all devices of this run together, or of this machine where it has no GPU."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory) * ranks.world_size()


def _remarks(recipe: Recipe, arguments: Any, steps: int, validated: bool) -> Iterator[str]:
    """Intervals that are longer than the run; below 1 they are shares of it."""
    from moe_finetune.training.run_log import logged_every

    interval = logged_every(steps)
    if arguments.logging_strategy == "steps" and arguments.logging_steps > steps:
        yield (
            f"trainer.logging_steps {arguments.logging_steps:g} is more than the run's {steps} "
            f"steps; it logs {'each' if interval == 1 else f'every {interval} steps'} instead"
        )
    if validated and arguments.eval_strategy == "steps" and arguments.eval_steps > steps:
        yield (
            f"trainer.eval_steps {arguments.eval_steps:g} is more than the run's {steps} steps; "
            "data.validation is evaluated only "
            + ("before the first step and " if arguments.eval_on_start else "")
            + "after the last"
        )
    if recipe.data.packing and recipe.data.packing_strategy == "wrapped":
        yield (
            "data.packing_strategy 'wrapped' cuts one stream of texts into rows, whose texts see "
            "each other; 'bfd_split' keeps them apart"
        )
    section = recipe.evaluation
    if section is not None and section.every is not None and section.every >= steps:
        yield (
            f"evaluation.every {section.every} is not less than the run's {steps} steps; it is "
            "scored only at its end"
        )
