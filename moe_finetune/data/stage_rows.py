"""Rows of stages that learn from preferences, labels or prompts, and tokenize their own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moe_finetune.data.examples import Examples, load_examples
from moe_finetune.data.readers import SourceReader, draw, listed
from moe_finetune.data.stage_form import FIELDS, StageFormer
from moe_finetune.data.tokenize import set_chat_template, tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.io.rows import Placed, Row
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import DataSection, DataSource, Paths
from moe_finetune.recipe.stages import STAGES, Stage

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
MEASURED = 256
"""Rows of a source that routing is measured on."""


def load_for_stage(recipe: Recipe, tokenizer: Any) -> Examples:
    """The examples of ``recipe``, in the form of its stage.

    Raises:
        DataError: see :func:`load_examples` and :func:`load_stage_rows`.
    """
    stage = STAGES[recipe.stage]
    if stage.form == "tokens":
        return load_examples(recipe.data, tokenizer, recipe.seed)
    room = 0
    if stage.form == "prompts":
        usual = next(
            field.default
            for field in dataclasses.fields(stage.config_class())
            if field.name == "max_completion_length"
        )
        room = recipe.trainer.get("max_completion_length", usual)
    rewards = [section.name for section in recipe.rewards]
    return load_stage_rows(stage, recipe.data, tokenizer, recipe.seed, room, rewards)


def load_stage_rows(
    stage: Stage,
    data: DataSection,
    tokenizer: Any,
    seed: int,
    room: int = 0,
    rewards: Sequence[str | None] = (),
) -> Examples:
    """Training and validation rows of a stage that tokenizes its own.

    Args:
        tokenizer: a fast tokenizer; gets the chat template that ``data`` names.
        seed: shuffles the training rows and draws those that a ``limit`` keeps.
        room: tokens that the trainer adds to a prompt.
        rewards: by name, whose fields each row must have.

    Returns:
        Rows with the stage's fields; ``sources`` have ``input_ids`` and ``labels`` of prompt and
        (chosen) answer, for measures of routing.

    Raises:
        DataError: a file, line or row that cannot be used, or nothing left to train on.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    train, parts = _read(stage, data.train, data, tokenizer, "train", order, room, rewards)
    validation = None
    if data.validation is not None:
        validation, parts = _read(
            stage, data.validation, data, tokenizer, "validation", 0, room, rewards
        )
    measured = [(path, _tokens(rows, tokenizer, data.max_length)) for path, rows in parts]
    return Examples(train.shuffle(order), validation, measured)


def _read(
    stage: Stage,
    sources: Paths,
    data: DataSection,
    tokenizer: Any,
    name: str,
    seed: int,
    room: int,
    rewards: Sequence[str | None],
) -> tuple[Dataset, list[tuple[str, list[Row]]]]:
    from datasets import Dataset

    kept: list[Row] = []
    parts, overlong = [], 0
    for number, source in enumerate(listed(sources, name)):
        first = len(kept)
        rows = _source(stage, source, data, seed + number, rewards)
        if data.limit is not None:
            rows = draw(rows, data.limit, seed, f"data.limit of data.{name}")
        for place, row in rows:
            # A cut answer would change what is preferred, so none is cut.
            if _fits(place, row, data, tokenizer, room):
                kept.append(row)
            else:
                overlong += 1
        parts.append((source.path, kept[first : first + MEASURED]))
    if not kept:
        raise DataError(
            f"data.{name}: none of its rows fits data.max_length {data.max_length}; raise it"
        )
    log.info("%s data: %d rows of %s", name, len(kept), " and ".join(FIELDS[stage.form]))
    if overlong:
        log.warning(
            "%s data: %d rows are longer than data.max_length %d and were left out",
            name,
            overlong,
            data.max_length,
        )
    try:
        return Dataset.from_list(kept), parts
    except (TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors or TypeErrors
        raise DataError(
            f"data.{name}: a field holds values of different kinds in different rows: {error}"
        ) from error


def _source(
    stage: Stage,
    source: DataSource,
    data: DataSection,
    seed: int,
    rewards: Sequence[str | None],
) -> Iterator[Placed]:
    if source.template or data.template:
        raise DataError(
            f"data.template: stage {stage.name} takes fields as they are; use data.columns"
        )
    former: Any = StageFormer(stage, source.columns or data.columns, rewards)
    return iter(SourceReader(source, former, source.split or data.split, seed))


def _fits(place: str, row: Row, data: DataSection, tokenizer: Any, room: int) -> bool:
    length = max(len(ids) for ids in _rendered(place, row, tokenizer)) + room
    if length > data.max_length and data.overlong == "error":
        raise DataError(
            f"{place}: {length} tokens, longer than data.max_length {data.max_length}; raise it, "
            "or set data.overlong: drop"
        )
    return length <= data.max_length


def _rendered(place: str, row: Row, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of the prompt with each of its answers, or of the prompt alone."""
    answers = [row[name] for name in ("chosen", "rejected", "completion") if name in row]
    prompt = row["prompt"]
    try:
        for answer in answers or [None]:
            if isinstance(prompt, str):
                yield tokenizer(prompt + (answer or ""))["input_ids"]
                continue
            if not tokenizer.chat_template:
                raise DataError(
                    f"{place}: chat messages, and the tokenizer has no chat template; name one "
                    "with data.chat_template"
                )
            text = tokenizer.apply_chat_template(
                prompt + (answer or []), tokenize=False, add_generation_prompt=answer is None
            )
            yield tokenizer(text, add_special_tokens=False)["input_ids"]
    except DataError:
        raise
    except Exception as error:  # templates raise what they like, through jinja
        raise DataError(f"{place}: the chat template refuses these messages: {error}") from error


def _tokens(rows: list[Row], tokenizer: Any, max_length: int) -> Dataset:
    """Ids and labels of prompt and first answer, as a supervised run would have them."""
    from datasets import Dataset

    made = []
    for row in rows:
        answer = row.get("chosen", row.get("completion"))
        if answer is None:
            (ids,) = _rendered("", row, tokenizer)
            made.append({"input_ids": ids, "labels": list(ids)})
            continue
        turns = isinstance(row["prompt"], list)
        formed = (
            {"messages": row["prompt"] + answer}
            if turns
            else {"prompt": row["prompt"], "completion": answer}
        )
        tokens = tokenize_row(formed, tokenizer, True)
        made.append(
            {"input_ids": tokens.input_ids[:max_length], "labels": tokens.labels[:max_length]}
        )
    return Dataset.from_list(made)
