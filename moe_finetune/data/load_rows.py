"""The training and validation rows of a run, in an order that the seed fixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_finetune.data.held_out import warn_of_few
from moe_finetune.data.preference_and_prompt_rows import StageRows, steps_of
from moe_finetune.data.prepared_rows import Preparation, prepare
from moe_finetune.data.row_lengths import LengthsOfData
from moe_finetune.data.sources import listed
from moe_finetune.data.token_rows import TokenRows
from moe_finetune.data.tokenize import set_chat_template
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES, Stage, trainer_value

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Examples:
    """The training and validation rows of a run, and the rows on which routing is measured.

    Attributes:
        train: shuffled by the seed.
        validation: in the files' order; None without ``data.validation``.
        sources: by path, rows with ids and labels of each validation source, or of each training
            source if there is no validation data, in the source's order.
        lengths: of the rows as the stage's trainer gets them.
        largest_id: the largest token id of all rows.
    """

    train: Dataset
    validation: Dataset | None
    sources: list[tuple[str, Dataset]]
    lengths: LengthsOfData
    largest_id: int


def load_for_stage(recipe: Recipe, tokenizer: Tokenizer) -> Examples:
    """Load the examples of ``recipe``, in the form of its stage."""
    stage = STAGES[recipe.stage]
    if stage.form == "tokens":
        return load_examples(recipe.data, tokenizer, recipe.seed)
    room = 0
    if stage.form == "prompts":
        room = trainer_value(stage, recipe.trainer, "max_completion_length")
    rewards = [section.name for section in recipe.rewards]
    return load_stage_rows(stage, recipe.data, tokenizer, recipe.seed, room, rewards)


def load_examples(data: DataSection, tokenizer: Tokenizer, seed: int) -> Examples:
    """Training and validation examples with ``input_ids`` and ``labels`` (-100: no loss).

    ``data.seed``, or ``seed``, shuffles the training rows and draws those of a ``limit``;
    validation keeps the file's order, and its draw does not depend on the seed.
    """
    set_chat_template(tokenizer, data.chat_template)
    return _load(lambda: TokenRows(data, tokenizer), data, seed)


def load_stage_rows(
    stage: Stage,
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    room: int = 0,
    rewards: Sequence[str | None] = (),
) -> Examples:
    """Rows of a stage whose trainer tokenizes them, in the order of :func:`load_examples`.

    ``sources`` have the ids and labels of prompts with (chosen) answers; ``room`` is the number of
    tokens that the trainer adds to a prompt.
    """
    set_chat_template(tokenizer, data.chat_template)
    steps = steps_of(stage, tokenizer)
    return _load(lambda: StageRows(stage, data, tokenizer, room, rewards, steps), data, seed)


def _load(preparation: Callable[[], Preparation], data: DataSection, seed: int) -> Examples:
    order = data.seed if data.seed is not None else seed
    rows, counts = prepare(data.train, preparation(), "train", order)
    # The order takes 8 bytes per row in memory; on disk it would be one file per seed.
    train = rows.shuffle(order, keep_in_memory=True)
    lengths = LengthsOfData(counts.lengths(data.max_length))
    validation, measured, largest_id = None, data.train, counts.largest
    if data.validation_sources is not None:
        drawn = order if isinstance(data.validation, float) else 0
        rows, counts = prepare(data.validation_sources, preparation(), "validation", drawn)
        validation, measured = rows, data.validation_sources
        lengths = LengthsOfData(lengths.train, counts.lengths(data.max_length))
        largest_id = max(largest_id, counts.largest)
        warn_of_few(data, len(train), len(validation))
    ends = list(itertools.accumulate(counts.sources))
    parts = [rows.select(range(end - n, end)) for n, end in zip(counts.sources, ends, strict=True)]
    paths = [source.path for source in listed(measured, "train")]
    of_source = preparation().measured
    sources = [
        (path, of_source(part)) for path, part in zip(paths, parts, strict=True) if len(part)
    ]
    return Examples(train, validation, sources, lengths, largest_id)
