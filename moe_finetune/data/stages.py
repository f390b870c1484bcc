"""Rows of stages whose trainers tokenize them: TRL's own columns, checked where they are read.

A text is used unchanged; a list of turns goes through the chat template with the row's ``tools``
and ``chat_template_kwargs``, which TRL's DPO reads from the row, too. A row that lacks a column is
refused with its file and line.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moe_finetune.data.examples import Examples, load_examples, malformed_line, unread_lines
from moe_finetune.data.rows import columns_of, renamed, with_values
from moe_finetune.data.sources import SourceReader, files_line, listed, rows_of
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import (
    Tokens,
    beginning_of,
    rendered,
    set_chat_template,
    tokenize_row,
)
from moe_finetune.data.turns import COLUMNS, TurnCounts, conversation, unlearned
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Row, short
from moe_finetune.recipe.data import DataSection, Paths
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES, Stage

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
ANSWERS = ("chosen", "rejected")
READ_BY = {"exact_match": "answer", "boxed": "answer", "code": "tests"}
"""Reward -> the field that it reads in a row."""
MEASURED = 256
"""Number of rows per source on which routing is measured."""


class StageFormer:
    """Brings the rows of one source into a stage's form, and notes what a log line is about:
    ``unread`` columns, ``turns``, ``largest_id``, and texts that have the beginning that TRL
    adds (``begun``).
    """

    largest_id = begun = 0

    def __init__(
        self,
        stage: Stage,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[str | None] = (),
    ):
        self.rewards = {READ_BY[name]: name for name in rewards if name in READ_BY}
        self.any_column = any(name not in READ_BY for name in rewards)
        self.form, self.columns, self.fields = stage.form, columns or {}, FIELDS[stage.form]
        self.unread: set[str] = set()
        self.turns = TurnCounts()
        for field in self.columns:
            if field not in self.fields and self.form == "preference":
                raise DataError(f"data.columns.{field}: unknown{did_you_mean(field, self.fields)}")

    def longest(self, ids: list[list[int]]) -> int:
        """Length of the longest of a row's texts; their largest id is noted."""
        self.largest_id = max(self.largest_id, *(max(text, default=0) for text in ids))
        return max(map(len, ids))

    def __call__(self, location: str, row: Row) -> Row:
        """Return the row in its form; raise DataError with ``location`` if it has none."""
        names, row = list(row), renamed(location, row, self.columns)
        self.unread |= self._unread(names, row)
        for field in ANSWERS:
            if isinstance(row.get(field), dict):  # a single turn
                row[field] = [row[field]]
        for field in self.fields:
            if field in row and row[field] is None:
                raise DataError(f"{location}: '{field}' is null; remove the row")
        turns = all(isinstance(row.get(field), list) and row[field] for field in ANSWERS)
        if turns and self.form == "preference" and isinstance(row.get("prompt"), str):
            row = _with_prompt_turns(location, row)
        if "prompt" not in row and turns:
            from trl.data_utils import extract_prompt

            row |= extract_prompt(row)
            if not row["prompt"]:
                raise DataError(
                    f"{location}: 'chosen' and 'rejected' must start with the same turns and then "
                    "differ; add the field 'prompt'"
                )
        for field in self.fields:
            if field not in row:
                raise DataError(
                    f"{location}: no field '{field}'; a row needs {', '.join(self.fields)}, "
                    f"and this one has {', '.join(map(str, names)) or 'no fields'}. Map your "
                    "fields with data.columns"
                    + (", or set stage: sft" if {"messages", "completion"} & set(names) else "")
                )
        if len({type(row[field]) for field in self.fields}) > 1:
            raise DataError(
                f"{location}: {', '.join(self.fields)} mix texts and turns; use only texts, or "
                "only lists of {role, content}"
            )
        formed = {field: row[field] for field in self.fields}
        for field in self.fields:
            formed |= self._checked(location, field, row)
        if self.form == "preference" and row["chosen"] == row["rejected"]:
            raise DataError(
                f"{location}: 'chosen' and 'rejected' are equal, so neither is preferred; remove "
                "the row"
            )
        for field, reward in self.rewards.items():
            _check_read(location, row, field, reward)
        return {**row, **formed} if self.form == "prompts" else formed

    def _unread(self, names: Sequence[str], row: Row) -> set[str]:
        """Columns that nothing reads; where fields are texts, those of conversations, too."""
        texts = all(isinstance(row.get(field, ""), str) for field in self.fields)
        read = {*self.fields, *columns_of(self.columns), *(() if texts else COLUMNS)}
        unread = with_values({name: row[name] for name in names}) - read
        if self.form == "prompts":
            unread = set() if self.any_column else unread & {*COLUMNS}
        return unread

    def _checked(self, location: str, field: str, row: Row) -> Row:
        """A checked field of texts or turns, with the tools and variables that a template reads."""
        value, answer = row[field], field != "prompt"
        if isinstance(value, str) and value.strip():
            return {field: value}
        if not isinstance(value, list) or not value:
            raise DataError(f"{location}: '{field}': must have text or turns, not {short(value)}")
        formed = conversation(location, value, {} if answer else row, field)
        self.turns.add(formed, tools=row.get("tools"))
        turns = formed["messages"]
        last = turns[-1]["role"]
        if answer != (last == "assistant"):
            raise DataError(
                f"{location}: '{field}': the last turn is from '{last}', but it must be "
                + ("the assistant's answer" if answer else "the turn to answer")
            )
        for index, turn in enumerate(turns if answer else ()):
            if turn["role"] != "assistant":
                raise DataError(
                    f"{location}: '{field}'[{index}]: a turn of '{turn['role']}', which would be "
                    "learned with the answer; move the turns before the last answer to 'prompt'"
                )
            if not turn.get("train", True):
                raise DataError(
                    f"{location}: '{field}'[{index}]: this answer is marked as not learned"
                )
        beside = {"tools": formed.get("tools"), "chat_template_kwargs": formed.get("variables")}
        beside = {name: value for name, value in beside.items() if value}
        if beside and self.form == "prompts":
            raise DataError(
                f"{location}: '{next(iter(beside))}': TRL's GRPO does not read it from a row; "
                "remove the column (trainer.chat_template_kwargs are variables for all rows)"
            )
        return {field: [{k: v for k, v in t.items() if k != "train"} for t in turns], **beside}


def _with_prompt_turns(location: str, row: Row) -> Row:
    """A row with a text as prompt and chats as answers (UltraFeedback): their first turns."""
    text, answers = row["prompt"], [row[field] for field in ANSWERS]
    if all(len(turns) == 1 for turns in answers):
        return {**row, "prompt": [{"role": "user", "content": text}]}
    shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
    contents = [turn.get("content", turn.get("value")) for turn, _ in shared]
    if not any(str(content).strip() == text.strip() for content in contents):
        raise DataError(
            f"{location}: 'prompt' is a text with which 'chosen' and 'rejected' do not begin; "
            "remove the field, or write it as turns"
        )
    return {name: value for name, value in row.items() if name != "prompt"}


def _check_read(location: str, row: Row, field: str, reward: str) -> None:
    """Refuse a row whose ``field`` the named reward cannot read."""
    if field not in row:
        names = f"{', '.join(map(str, row))}{did_you_mean(field, row)}"
        raise DataError(
            f"{location}: no field '{field}', which rewards: '{reward}' reads; the row has "
            f"{names.removesuffix('?')}; map your fields with data.columns: {{{field}: ...}}"
        )
    value = row[field]
    good = isinstance(value, str | int | float) and bool(str(value).strip())
    good = good and not (isinstance(value, float) and not math.isfinite(value))
    expected = "text or a number"
    if field == "tests":
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list) and bool(texts) and all(map(_has_code, texts))
        expected = "Python code or a list of such texts"
    if not good:
        raise DataError(
            f"{location}: '{field}': must be {expected}, which rewards: '{reward}' reads, not "
            f"{short(value)}"
        )


def _has_code(text: Any) -> bool:
    """Return whether a test contains code; any program passes an empty one."""
    lines = (line.strip() for line in text.splitlines()) if isinstance(text, str) else ()
    return any(line and not line.startswith("#") and line != "pass" for line in lines)


def load_for_stage(recipe: Recipe, tokenizer: Any) -> Examples:
    """Load the examples of ``recipe``, in the form of its stage."""
    stage = STAGES[recipe.stage]
    if stage.form == "tokens":
        return load_examples(recipe.data, tokenizer, recipe.seed)
    usual = getattr(stage.config_class(), "max_completion_length", 0)
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
    """Training and validation rows of a stage whose trainer tokenizes them.

    ``sources`` have the ids and labels of prompts with (chosen) answers, to measure routing;
    ``room`` is the number of tokens that the trainer adds to a prompt.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    train, measured, largest_id = _read(
        stage, data.train, data, tokenizer, "train", order, room, rewards
    )
    validation = None
    if data.validation is not None:
        validation, measured, largest = _read(
            stage, data.validation, data, tokenizer, "validation", 0, room, rewards
        )
        largest_id = max(largest_id, largest)
    return Examples(train.shuffle(order), validation, measured, largest_id)


def _read(
    stage: Stage,
    sources: Paths,
    data: DataSection,
    tokenizer: Any,
    name: str,
    seed: int,
    room: int,
    rewards: Sequence[str | None],
) -> tuple[Dataset, list[tuple[str, Dataset]], int]:
    """The rows of all sources, the tokens of each source's first rows, and the largest id.

    A truncated answer could change the preference, so none is truncated.
    """
    from datasets import Dataset

    chosen, readers, overlong, unread = listed(sources, name), [], 0, set[str]()
    formers = []
    for index, source in enumerate(chosen):
        if source.template or data.template:
            raise DataError(
                f"data.template: stage {stage.name} uses fields unchanged; use data.columns"
            )
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)
        former = StageFormer(stage, source.columns or data.columns, rewards)
        formers.append(former)
        adapted = functools.partial(_adapted, former, tokenizer)
        readers.append(SourceReader(source, data, seed + index, adapted))
    parts: list[list[Row]] = [[] for _ in chosen]
    for index, location, (row, length) in rows_of(readers, data, name, seed):
        if length + room <= data.max_length:
            parts[index].append(row)
        elif data.overlong == "error":
            raise DataError(
                f"{location}: {length + room} tokens, longer than data.max_length "
                f"{data.max_length}; raise it, or set data.overlong: drop"
            )
        else:
            overlong += 1
    rows = [row for part in parts for row in part]
    if not rows:
        added, remedy = "", "raise it"
        if room:
            added = f" with {room} tokens of trainer.max_completion_length"
            remedy = "raise it, or lower trainer.max_completion_length"
        raise DataError(
            f"data.{name}: all rows{added} are longer than data.max_length {data.max_length}; "
            f"{remedy}"
        )
    log.info("%s data: %d rows of %s", name, len(rows), ", ".join(FIELDS[stage.form]))
    for former, source in zip(formers, chosen, strict=True):
        unread |= former.unread - {*source.where, *source.words}
    reads = field_reader(tokenizer)
    counted = [line for former in formers for line in former.turns.lines(reads)]
    if begun := sum(former.begun for former in formers):
        counted.append(
            f"{begun} texts begin with the special token that TRL adds, so they have it twice; "
            "remove it from the texts"
        )
    for line in [*counted, *unread_lines(unread)]:
        log.warning("%s data: %s", name, line)
    malformed = [reader for reader in readers if reader.malformed]
    if malformed:
        count = sum(reader.malformed for reader in malformed)
        log.warning("%s data: %s", name, malformed_line(count, malformed[0].first_malformed))
    if overlong:
        log.warning("%s data: %d rows are longer than data.max_length %d and were dropped",
                    name, overlong, data.max_length)  # fmt: skip
    measured = [[_measured(row, tokenizer, data) for row in part[:MEASURED]] for part in parts]
    paths = [source.path for source in chosen]
    sources_measured = list(zip(paths, map(Dataset.from_list, measured), strict=True))
    return _table(rows, name), sources_measured, max(former.largest_id for former in formers)


def _adapted(former: StageFormer, tokenizer: Any, location: str, row: Row) -> tuple[Row, int]:
    """The row in TRL's form, and the number of tokens of its prompt with the longest answer.

    Turns are in the form that the chat template accepts.
    """
    row = former(location, row)
    answers = [name for name in ANSWERS if name in row]
    if isinstance(row["prompt"], str):
        texts = [row["prompt"] + row[name] for name in answers] or [row["prompt"]]
        texts_ids = [tokenizer(text)["input_ids"] for text in texts]
        beginning = beginning_of(tokenizer)
        twice = [*beginning, *beginning]
        former.begun += bool(twice) and texts_ids[0][: len(twice)] == twice
        if answers and tokenizer.eos_token_id is not None:  # TRL ends an answer that has no end
            for text, ids in zip(texts, texts_ids, strict=True):
                ids += [] if text.endswith(tokenizer.eos_token) else [tokenizer.eos_token_id]
        return row, former.longest(texts_ids)
    prompt, adapted = row["prompt"], dict(row)
    try:
        text, adapted["prompt"] = rendered(_chat(row, prompt), tokenizer, True)
        texts = [text]
        for name in answers:
            text, turns = rendered(_chat(row, prompt + row[name]), tokenizer)
            adapted[name] = turns[len(prompt) :]
            texts.append(text)
    except DataError as error:
        raise type(error)(f"{location}: {error}") from error
    if "tools" in row:
        adapted["tools"] = json.dumps(row["tools"])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return adapted, former.longest(ids)


def _chat(row: Row, turns: list[Row]) -> Row:
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"messages": turns, "tools": tools, "variables": variables}


def _table(rows: list[Row], name: str) -> Dataset:
    """Rows as a table; turns stay as they are, although a table gives all objects one's fields."""
    from datasets import Dataset, Features, Json

    turns = [field for field in ("prompt", *ANSWERS, "chat_template_kwargs")
             if any(isinstance(row.get(field), list | dict) for row in rows)]  # fmt: skip
    empty: Row = {"chat_template_kwargs": {}} if "chat_template_kwargs" in turns else {}
    empty |= {"tools": None} if any("tools" in row for row in rows) else {}
    rows = [{**empty, **row} for row in rows]
    features: dict[str, Any] = {}
    for field in dict.fromkeys(key for row in rows for key in row):
        features[field] = Json()
        values = [row.get(field) for row in rows]
        with suppress(TypeError, ValueError, OverflowError):  # pyarrow's; JSON has any value
            features |= {} if field in turns else Dataset.from_dict({field: values}).features
    try:
        return Dataset.from_list(rows, features=Features(features))
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"data.{name}: a field cannot be stored: {error}") from error


def _measured(row: Row, tokenizer: Any, data: DataSection) -> Row:
    """Ids and labels of prompt and first answer, as in a supervised run."""
    tokens, end = prompt_and_answer(row, tokenizer), data.max_length
    return {"input_ids": tokens.input_ids[:end], "labels": tokens.labels[:end]}


def prompt_and_answer(row: Row, tokenizer: Any, answer: str | None = None) -> Tokens:
    """Ids of a row's prompt and ``answer`` (default: the preferred one), with labels on the answer,
    or on a prompt that is alone.
    """
    answer = answer or ("chosen" if "chosen" in row else None)
    prompt = row["prompt"]
    chat = isinstance(prompt, list)
    if answer is None:
        text = rendered(_chat(row, prompt), tokenizer, True)[0] if chat else prompt
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return Tokens(ids, list(ids))
    if chat:
        return tokenize_row(_chat(row, unlearned(prompt) + row[answer]), tokenizer, True)
    return tokenize_row({"prompt": prompt, "completion": row[answer]}, tokenizer, True)
