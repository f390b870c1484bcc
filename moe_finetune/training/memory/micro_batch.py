"""The largest micro-batch of a run: of its rows if they are read, else of ``data.max_length``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from moe_finetune.io.counted import counted
from moe_finetune.recipe.stages import STAGES, trainer_value

if TYPE_CHECKING:
    from moe_finetune.data.row_lengths import LengthsOfData, RowLengths
    from moe_finetune.recipe.schema import Recipe

SNAPSHOT = 1024
"""Tokens of the rows on which routing is measured at once, unless one row is longer."""


class MicroBatch(NamedTuple):
    """The largest possible micro-batch of a stage: ``rows``, counting both of a pair.

    ``reference``: whether a second model is in memory; ``read``: whether ``length`` is that of the
    longest row, and not only the limit.
    """

    rows: int
    length: int
    reference: bool = False
    read: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def __str__(self) -> str:
        count, length = counted(self.rows, "row"), counted(self.length, "token")
        unread = f"{count} of up to {length}: not read yet"
        rows = f"{count}, longest row {length}" if self.read else unread
        return rows + (", a reference with the model" if self.reference else "")


def micro_batch(recipe: Recipe, lengths: LengthsOfData | None = None) -> MicroBatch:
    """The micro-batch of ``recipe`` on rows of these lengths."""
    trainer, stage = recipe.trainer, STAGES[recipe.stage]
    batch = int(trainer.get("per_device_train_batch_size", 8))
    rows, length = _padded(recipe, batch, lengths and lengths.train)
    reference = stage.reference and not trainer.get("precompute_ref_log_probs", False)
    adapted = recipe.lora is not None and recipe.lora.adapts(recipe.router.train)
    if stage.form == "prompts" and not adapted:  # TRL's import, for its default
        reference = float(trainer_value(stage, trainer, "beta")) > 0
    return MicroBatch(rows, length, reference and not adapted, lengths is not None)


def evaluation_batch(recipe: Recipe, lengths: LengthsOfData | None = None) -> MicroBatch | None:
    """The rows of one forward of the evaluation; None if the run has none.

    Its size is transformers' default, unless the recipe has ``per_device_eval_batch_size``.
    """
    trainer, stage = recipe.trainer, STAGES[recipe.stage]
    if recipe.data.validation is None or trainer.get("eval_strategy") in (False, "no"):
        return None
    default = 8
    if stage.form == "prompts":
        default = trainer.get("num_generations_eval") or trainer.get("num_generations") or 8
    batch = int(trainer.get("per_device_eval_batch_size") or default)
    rows, length = _padded(recipe, batch, lengths and lengths.validation)
    return MicroBatch(rows, length, read=lengths is not None)


def routing_tokens(recipe: Recipe, lengths: LengthsOfData | None = None) -> int:
    """The most tokens at once when routing is measured; fewer than a batch where rows are short."""
    if lengths is None:
        batch = micro_batch(recipe)
        return max(batch.length, min(SNAPSHOT, batch.tokens))
    measured = lengths.validation or lengths.train
    return max(measured.longest, min(SNAPSHOT, measured.tokens))


def _padded(recipe: Recipe, batch: int, lengths: RowLengths | None) -> tuple[int, int]:
    """Rows and their common length in the largest batch that the stage's collator makes."""
    trainer, stage = recipe.trainer, STAGES[recipe.stage]
    # A trainer pads to a multiple, which may be more than the longest row that it allows.
    multiple = int(trainer.get("pad_to_multiple_of") or 1)
    length = recipe.data.max_length
    if lengths is not None and recipe.data.packing and stage.form == "tokens":
        batch = min(batch, math.ceil(lengths.tokens / length))
        length = min(length, math.ceil(lengths.tokens / batch))
    elif lengths is not None:
        length = lengths.longest
        if stage.form != "prompts":  # of which each has a group of completions
            batch = min(batch, lengths.rows)
    length = math.ceil(length / multiple) * multiple
    if stage.form == "prompts":
        completion = int(trainer_value(stage, trainer, "max_completion_length"))
        length += math.ceil(completion / multiple) * multiple
    return batch * (2 if stage.form == "preference" else 1), length
