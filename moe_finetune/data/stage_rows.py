"""Rows for stages that train on preferences, labels or prompts, tokenized by their trainers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_finetune.data.chat import RenderingError
from moe_finetune.data.examples import Examples, load_examples
from moe_finetune.data.readers import (
    DROP_REMEDY,
    SourceReader,
    listed,
    malformed_line,
    rows_of,
)
from moe_finetune.data.sources import files_line
from moe_finetune.data.stage_form import FIELDS, StageFormer
from moe_finetune.data.tokenize import (
    Tokens,
    rendered,
    set_chat_template,
    tokenize_row,
    with_carried,
)
from moe_finetune.data.turns import unlearned
from moe_finetune.errors import DataError
from moe_finetune.io.rows import Row
from moe_finetune.recipe.data import DataSection, DataSource, Paths
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES, Stage

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
TURNS = ("prompt", "chosen", "rejected")
"""Fields that are texts or turns."""
MEASURED = 256
"""Number of rows per source on which routing is measured."""


def load_for_stage(recipe: Recipe, tokenizer: Any) -> Examples:
    """Load the examples of ``recipe``, in the form of its stage.

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
    """Load training and validation rows of a stage whose trainer tokenizes them.

    Args:
        tokenizer: a fast tokenizer; its chat template is set to the one that ``data`` names.
        seed: shuffles the training rows and draws the rows for a ``limit``.
        room: tokens that the trainer adds to a prompt.
        rewards: names of rewards, whose fields each row must have.

    Returns:
        Rows with the stage's fields; ``sources`` have ``input_ids`` and ``labels`` of prompt and
        (chosen) answer, to measure routing.

    Raises:
        DataError: a file, line or row cannot be used, or no training rows remain.
    """
    set_chat_template(tokenizer, data.chat_template)
    tokenizer = with_carried(tokenizer)
    order = data.seed if data.seed is not None else seed
    train, parts = _read(stage, data.train, data, tokenizer, "train", order, room, rewards)
    validation = None
    if data.validation is not None:
        validation, parts = _read(
            stage, data.validation, data, tokenizer, "validation", 0, room, rewards
        )
    measured = [(path, _tokens(rows, tokenizer, data.max_length)) for path, rows in parts]
    return Examples(train.shuffle(order), validation, measured, tokenizer)


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

    chosen = listed(sources, name)
    for source in chosen:
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)
    readers = [_source(stage, s, data, seed + n, rewards) for n, s in enumerate(chosen)]
    of_source: list[list[Row]] = [[] for _ in chosen]
    overlong, usable = 0, False
    for index, location, row in rows_of(readers, data, name, seed):
        try:
            adapted, length = _adapted(location, row, tokenizer)
        except RenderingError as error:
            if data.malformed != "drop":
                remedy = DROP_REMEDY if usable else ""
                raise DataError(f"{error}{remedy}") from error
            readers[index].note_malformed(error)
            continue
        # A truncated answer could change the preference, so none is truncated.
        if _fits(location, length + room, data):
            of_source[index].append(adapted)
            usable = True
        else:
            overlong += 1
    fitting = [row for rows in of_source for row in rows]
    num_malformed = sum(reader.malformed for reader in readers)
    malformed = [reader.first_malformed for reader in readers if reader.malformed]
    unread = {field for reader in readers for field in reader.unread}
    if not fitting and malformed and not overlong:
        raise DataError(f"data.{name}: all rows are malformed; the first: {malformed[0]}")
    if not fitting:
        others = f" ({malformed_line(num_malformed, malformed[0])})" if malformed else ""
        raise DataError(
            f"data.{name}: all rows are longer than data.max_length {data.max_length}; raise it"
            f"{others}"
        )
    log.info("%s data: %d rows of %s", name, len(fitting), ", ".join(FIELDS[stage.form]))
    if malformed:
        log.warning("%s data: %s", name, malformed_line(num_malformed, malformed[0]))
    if overlong:
        log.warning(
            "%s data: %d rows are longer than data.max_length %d and were dropped",
            name,
            overlong,
            data.max_length,
        )
    if unread and stage.form != "prompts":
        log.warning("%s data: not used: %s", name, ", ".join(sorted(unread)))
    try:
        dataset = Dataset.from_list(fitting, features=_features(fitting))
    except (TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors or TypeErrors
        raise DataError(
            f"data.{name}: a field has values of different types in different rows: {error}"
        ) from error
    parts = zip(chosen, of_source, strict=True)
    return dataset, [(source.path, rows[:MEASURED]) for source, rows in parts]


def _source(
    stage: Stage,
    source: DataSource,
    data: DataSection,
    seed: int,
    rewards: Sequence[str | None],
) -> SourceReader:
    if source.template or data.template:
        raise DataError(
            f"data.template: stage {stage.name} uses fields unchanged; use data.columns"
        )
    former: Any = StageFormer(stage, source.columns or data.columns, rewards)
    drops = data.malformed == "drop"
    return SourceReader(source, former, source.split or data.split, seed, drops)


def _features(rows: list[Row]) -> Any:
    """Features that keep turns unchanged; a plain table gives all objects the same fields."""
    from datasets import Dataset, Features, Json

    turns = [name for name in TURNS if any(isinstance(row.get(name), list) for row in rows)]
    if not turns:
        return None
    others = [{k: v for k, v in row.items() if k not in turns} for row in rows]
    inferred = Dataset.from_list(others).features if others[0] else {}
    return Features({**inferred, **{name: Json() for name in turns}})


def _fits(location: str, length: int, data: DataSection) -> bool:
    if length > data.max_length and data.overlong == "error":
        raise DataError(
            f"{location}: {length} tokens, longer than data.max_length {data.max_length}; raise "
            "it, or set data.overlong: drop"
        )
    return length <= data.max_length


def _adapted(location: str, row: Row, tokenizer: Any) -> tuple[Row, int]:
    """The row in TRL's form, and the number of tokens of its prompt with the longest answer.

    Turns are in the form that the chat template accepts; the row's tools and variables are stored
    in the first turn.
    """
    row = dict(row)
    extras = {"tools": row.pop("tools", None), **(row.pop("variables", None) or {})}
    extras = {name: value for name, value in extras.items() if value is not None}
    answers = [name for name in TURNS if name != "prompt" and name in row]
    if isinstance(row["prompt"], str):
        texts = [row["prompt"] + row[name] for name in answers] or [row["prompt"]]
        return row, max(len(tokenizer(text)["input_ids"]) for text in texts)
    prompt, extra = row["prompt"], {"tools": extras.get("tools"), "variables": extras}
    try:
        text, row["prompt"] = rendered({"messages": prompt, **extra}, tokenizer, True)
        texts = [text]
        for name in answers:
            text, turns = rendered({"messages": prompt + row[name], **extra}, tokenizer)
            row[name] = turns[len(prompt) :]
            texts.append(text)
        if extras:
            row["prompt"][0]["carried"] = extras
    except DataError as error:
        raise type(error)(f"{location}: {error}") from error
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return row, max(lengths)


def _tokens(rows: list[Row], tokenizer: Any, max_length: int) -> Dataset:
    """Ids and labels of prompt and first answer, as in a supervised run."""
    from datasets import Dataset

    tokenized = []
    for row in rows:
        tokens = prompt_and_answer(row, tokenizer)
        tokenized.append(
            {"input_ids": tokens.input_ids[:max_length], "labels": tokens.labels[:max_length]}
        )
    return Dataset.from_list(tokenized)


def prompt_and_answer(row: Row, tokenizer: Any, answer: str | None = None) -> Tokens:
    """Ids of a row's prompt and answer, with labels on the answer, or on the prompt if it is alone.

    Args:
        answer: the field of the answer; default: the preferred one.
    """
    answer = answer or ("chosen" if "chosen" in row else None)
    prompt = row["prompt"]
    if answer is None:
        chat = isinstance(prompt, list)
        text = rendered({"messages": prompt}, tokenizer, True)[0] if chat else prompt
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return Tokens(ids, list(ids))
    if isinstance(prompt, list):
        return tokenize_row({"messages": unlearned(prompt) + row[answer]}, tokenizer, True)
    return tokenize_row({"prompt": prompt, "completion": row[answer]}, tokenizer, True)
