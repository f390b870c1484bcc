"""A run's plan: rows, steps, trained parameters, memory. Nothing is built or written."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.memory.plan import RESERVED, MemoryPlan
from moe_finetune.training.memory.stored import GIB

if TYPE_CHECKING:
    from datasets import Dataset

    from moe_finetune.lora.coverage import Coverage


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        stage: the training stage.
        method: the preset's name, or "no preset"; terms: its losses.
        coverage: parameters that LoRA reaches and that train.
        fixed: bytes that do not depend on the batch: weights, adapter, gradients and moments.
        memory: plan for one device without sharding, if requested.
        machine: total memory of this run's devices, in bytes.
        rows, tokens: size of the training data, tokens if known; validation: its rows, or None.
        batch: sequences per optimizer step over all processes.
        steps: optimizer steps; approximate for packed rows.
        packed: whether rows are packed.
        remarks: settings without effect in a run of this length.
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
    evaluation: str = "none"

    @property
    def memory_line(self) -> str:
        """What the run needs, in one line."""
        machine = f"this machine has {self.machine / GIB:.1f} GiB"
        if self.memory is None:
            fixed = f"{self.fixed / GIB:.2f} GiB for weights, adapter and optimizer"
            return f"memory: {fixed}; {machine}"
        plan = self.memory
        return f"memory: {plan.total / GIB:.2f} GiB at its worst moment ({plan.moment}); {machine}"

    def text(self) -> str:
        losses = f" ({', '.join(self.terms)})" if self.terms else ""
        validation = "none" if self.validation is None else f"{self.validation:,} rows"
        about = "about " if self.packed else ""
        return "\n".join(
            [
                self.coverage.table(),
                "",
                *(self.memory.lines() if self.memory is not None else []),
                f"  {'machine':<12} {self.machine / GIB:8.2f} GiB",
                "",
                f"stage          {self.stage}",
                f"method         {self.method}{losses}",
                f"training data  {self.rows:,} rows"
                + ("" if self.tokens is None else f", {self.tokens:,} tokens")
                + (", packed" if self.packed else ""),
                f"validation     {validation}",
                f"steps          {about}{self.steps:,}, of {self.batch} sequences",
                f"evaluation     {self.evaluation}",
                *(f"note: {remark}" for remark in self.remarks),
            ]
        )


def make_plan(
    recipe: Recipe,
    coverage: Coverage,
    fixed: int,
    memory: MemoryPlan | None,
    train: Dataset,
    validation: Dataset | None,
) -> Plan:
    """Make a plan: count rows, tokens and steps; the caller gives the rest."""
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
        machine=machine_bytes(),
        rows=len(train),
        tokens=tokens,
        validation=None if validation is None else len(validation),
        batch=batch,
        steps=steps,
        packed=recipe.data.packing,
        remarks=list(_remarks(recipe, arguments, steps, validation is not None)),
        opening=describe_steps(recipe, arguments, len(train), tokens),
        evaluation=_evaluation(recipe),
    )


def _evaluation(recipe: Recipe) -> str:
    section = recipe.evaluation
    if section is None:
        return "none"
    if not section.base or recipe.model.init == "random":
        return section.suite
    return (
        f"{section.suite}; then of the base, which takes as long once more for all runs that start "
        "from it (evaluation.base)"
    )


def count_steps(recipe: Recipe, arguments: Any, rows: int, tokens: int) -> tuple[int, int]:
    """Sequences per step, and number of steps; packed rows are counted as full."""
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
    """One line with the number of steps and the size of one.

    Args:
        tokens: tokens of the rows; None if the stage's trainer tokenizes.
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


def machine_bytes() -> int:
    """Total memory of this run's devices in bytes, or of this machine if it has no GPU."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory) * ranks.world_size()


def machine_room() -> int:
    """Bytes of one device that tensors can take; on a GPU, CUDA and fragmentation take some."""
    import torch

    size = machine_bytes() // (ranks.world_size() if torch.cuda.is_available() else 1)
    return round(size * (1 - RESERVED)) if torch.cuda.is_available() else size


def _remarks(recipe: Recipe, arguments: Any, steps: int, validated: bool) -> Iterator[str]:
    """Yield a remark for each interval longer than the run; below 1 they are shares of it."""
    from moe_finetune.training.run_log import logged_every

    interval = logged_every(steps)
    if arguments.logging_strategy == "steps" and arguments.logging_steps > steps:
        yield (
            f"trainer.logging_steps {arguments.logging_steps:g} is more than the run's {steps} "
            f"steps; the run logs {'every step' if interval == 1 else f'every {interval} steps'} "
            "instead"
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
            "data.packing_strategy 'wrapped' cuts one stream of texts into rows whose texts "
            "attend to each other; 'bfd_split' keeps them separate"
        )
    section = recipe.evaluation
    if section is not None and section.every is not None and section.every >= steps:
        yield (
            f"evaluation.every {section.every} is not less than the run's {steps} steps; the run "
            "is scored only at its end"
        )
