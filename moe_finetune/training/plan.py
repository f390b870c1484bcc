"""A run's plan: rows, steps, trained parameters, memory, disk. Nothing is built or written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.io.folder import check_space
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.memory import GIB, MemoryPlan, state_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

    from moe_finetune.lora.coverage import Coverage


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        arguments: TRL's config for the stage.
        coverage: parameters that LoRA reaches and that train.
        fixed: bytes that do not depend on the batch: weights, adapter, gradients and moments.
        memory: plan for one device without sharding, if requested; ``unknown``: why there is none.
        train, validation: the rows.
        machine: total memory of this run's devices, in bytes.
    """

    recipe: Recipe
    arguments: Any
    coverage: Coverage
    fixed: int
    memory: MemoryPlan | None
    unknown: str | None
    train: Dataset
    validation: Dataset | None
    machine: int

    @property
    def tokens(self) -> int | None:
        """Tokens of the training rows; None if the stage's trainer tokenizes."""
        if "input_ids" not in self.train.column_names:
            return None
        import pyarrow.compute as pc

        # From the offsets of the mapped file, whose rows may be many; shuffled or not, all count.
        return pc.sum(pc.list_value_length(self.train.data.column("input_ids"))).as_py()

    @property
    def steps(self) -> int:
        """Optimizer steps; approximate for packed rows."""
        return count_steps(self.recipe, self.arguments, len(self.train), self.tokens or 0)[1]

    def opening(self) -> list[str]:
        """What a run says as it begins: its steps, and what it needs."""
        machine = f"this machine has {self.machine / GIB:.1f} GiB"
        needs = f"{self.fixed / GIB:.2f} GiB for weights, adapter and optimizer"
        if self.memory is not None:
            most, moment = self.memory.total / GIB, self.memory.moment
            needs = f"{most:.2f} GiB at its worst moment ({moment})"
        steps = describe_steps(self.recipe, self.arguments, len(self.train), self.tokens)
        return [steps, f"memory: {needs}; {machine}"]

    def text(self) -> str:
        recipe, tokens, packed = self.recipe, self.tokens, self.recipe.data.packing
        batch, steps = count_steps(recipe, self.arguments, len(self.train), tokens or 0)
        terms = ", ".join(recipe.method.terms)
        length = "" if tokens is None else f", {tokens:,} tokens"
        validation = "none" if self.validation is None else f"{len(self.validation):,} rows"
        return "\n".join(
            [
                self.coverage.table(),
                "",
                *(self.memory.lines() if self.memory is not None else []),
                f"  {'machine':<12} {self.machine / GIB:8.2f} GiB",
                "",
                f"stage          {recipe.stage}",
                f"method         {recipe.method.preset or 'no preset'}"
                + (f" ({terms})" if terms else ""),
                f"training data  {len(self.train):,} rows{length}{', packed' if packed else ''}",
                f"validation     {validation}",
                f"steps          {'about ' if packed else ''}{steps:,}, of {batch} sequences",
                f"evaluation     {_evaluation(recipe)}",
                *(f"note: {remark}" for remark in self.remarks()),
            ]
        )

    def remarks(self) -> Iterator[str]:
        """Yield settings that have no effect in a run of this length, and other surprises."""
        from moe_finetune.training.run_log import logged_every

        arguments, steps, data = self.arguments, self.steps, self.recipe.data
        interval = logged_every(steps)
        if arguments.logging_strategy == "steps" and arguments.logging_steps > steps:
            yield (
                f"trainer.logging_steps {arguments.logging_steps:g} is more than the run's {steps} "
                "steps; the run logs "
                f"{'every step' if interval == 1 else f'every {interval} steps'} instead"
            )
        validated = self.validation is not None
        if validated and arguments.eval_strategy == "steps" and arguments.eval_steps > steps:
            yield (
                f"trainer.eval_steps {arguments.eval_steps:g} is more than the run's {steps} "
                "steps; data.validation is evaluated only "
                + ("before the first step and " if arguments.eval_on_start else "")
                + "after the last"
            )
        if data.packing and data.packing_strategy == "wrapped":
            yield (
                "data.packing_strategy 'wrapped' cuts one stream of texts into rows whose texts "
                "attend to each other; 'bfd_split' keeps them separate"
            )
        section = self.recipe.evaluation
        if section is not None and section.every is not None and section.every >= steps:
            yield (
                f"evaluation.every {section.every} is not less than the run's {steps} steps; the "
                "run is scored only at its end"
            )
        if self.unknown is not None:
            yield self.unknown

    def check_disk(self, folder: Path, merged: int) -> None:
        """Refuse a run whose adapter, checkpoints and ``merged`` bytes do not fit on the disk.

        Raises:
            DiskSpaceError: with the sizes needed and free.
        """
        trained, trainer = self.coverage.total.trained_parameters, self.recipe.trainer
        weights = 4 * trained
        checkpoint = weights + state_bytes(self.recipe, trained)
        check_space(folder, weights + _checkpoints(trainer, self.steps) * checkpoint + merged)


def _checkpoints(trainer: dict[str, Any], steps: int) -> int:
    """How many lie on the disk at once: one more than are kept, while the next is written."""
    if trainer.get("save_strategy") == "no":
        return 0
    interval = float(trainer.get("save_steps", 500))
    interval = interval if interval >= 1 else interval * steps
    written = max(1, int(steps // max(interval, 1)))
    return min(written, int(trainer.get("save_total_limit", 2) or written) + 1)


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
