"""Rows of preferences and prompts: TRL's columns, checked where they are read, and TRL's tokens.

A text is used unchanged; a list of turns goes through the chat template with the row's ``tools``
and ``chat_template_kwargs``, which TRL's DPO reads from the row, too. A row that lacks a column, or
of which the template would omit a part, is refused with its file and line. What is too long is
counted in the rows that TRL has prepared.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moe_finetune.data.held_out import warn_of_few
from moe_finetune.data.prepared_rows import Examples, load_examples, said, unread_lines
from moe_finetune.data.row_forms import (
    STAGE_FIELDS,
    check_fields,
    columns_of,
    renamed,
    with_values,
)
from moe_finetune.data.row_lengths import LengthsOfData, RowLengths
from moe_finetune.data.sources import SourceReader, files_line, listed, rows_of
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import IGNORED, beginning_of, rendered, set_chat_template
from moe_finetune.data.turns import COLUMNS, TurnCounts, conversation
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.counted import counted, in_number
from moe_finetune.io.row_files import Row, short
from moe_finetune.recipe.data import DataSection, Paths
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES, Stage, trainer_value

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
ANSWERS = ("chosen", "rejected")
READ_BY = {"exact_match": "answer", "boxed": "answer", "code": "tests"}
"""Reward -> the field that it reads in a row."""
MEASURED = 256
"""Number of rows per source on which routing is measured."""


class StageFormer:
    """Brings the rows of one source into a stage's form, and notes what a log line is about:
    ``unread`` columns and ``turns``. With a ``tokenizer``, turns have the form of which its chat
    template omits nothing.
    """

    def __init__(
        self,
        stage: Stage,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[str | None] = (),
        tokenizer: Any = None,
    ):
        self.tokenizer = tokenizer
        self.rewards = {READ_BY[name]: name for name in rewards if name in READ_BY}
        self.any_column = any(name not in READ_BY for name in rewards)
        self.form, self.columns, self.fields = stage.form, columns or {}, STAGE_FIELDS[stage.form]
        self.unread: set[str] = set()
        self.turns = TurnCounts()
        for field in self.columns:
            if field not in self.fields and self.form == "preference":
                raise DataError(f"data.columns.{field}: unknown{did_you_mean(field, self.fields)}")

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
        check_fields(location, names, row, self.form, self.columns)
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
        formed = {**row, **formed} if self.form == "prompts" else formed
        return formed if self.tokenizer is None else self._rendered(location, formed)

    def _rendered(self, location: str, row: Row) -> Row:
        """The row in the form that TRL renders without loss."""
        tokenizer, prompt = self.tokenizer, row["prompt"]
        answers = [name for name in ANSWERS if name in row]
        if isinstance(prompt, str):
            if answers and tokenizer.eos_token is None:
                raise DataError(
                    f"{location}: TRL ends an answer with the tokenizer's end, and this tokenizer "
                    "has none; choose another model.tokenizer"
                )
            return row
        options = {"tools": row.get("tools"), "variables": row.get("chat_template_kwargs")}
        chat = {"messages": prompt, **options}
        try:
            row = {**row, "prompt": rendered(chat, tokenizer, True)[1]}
            for name in answers:
                _, turns = rendered({**chat, "messages": prompt + row[name]}, tokenizer)
                row[name] = turns[len(prompt) :]
        except DataError as error:
            raise type(error)(f"{location}: {error}") from error
        return {**row, "tools": json.dumps(row["tools"])} if "tools" in row else row

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
                "remove the column"
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


def fields_read(stage: Stage, rewards: Sequence[str | None]) -> set[str] | None:
    """The fields of a formed row that the stage's trainer reads; None for all."""
    if stage.form == "preference" or any(name not in READ_BY for name in rewards):
        return None
    return {*STAGE_FIELDS[stage.form], *(READ_BY[name] for name in rewards if name in READ_BY)}


def load_for_stage(recipe: Recipe, tokenizer: Any) -> Examples:
    """Load the examples of ``recipe``, in the form of its stage."""
    stage = STAGES[recipe.stage]
    if stage.form == "tokens":
        return load_examples(recipe.data, tokenizer, recipe.seed)
    room = 0
    if stage.form == "prompts":
        room = trainer_value(stage, recipe.trainer, "max_completion_length")
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
    read = functools.partial(_read, stage, data, tokenizer, room, rewards)
    train, measured, lengths, largest_id = read(data.train, "train", order)
    validation = of_validation = None
    if data.validation_sources is not None:
        drawn = order if isinstance(data.validation, float) else 0
        validation, measured, of_validation, largest = read(
            data.validation_sources, "validation", drawn
        )
        largest_id = max(largest_id, largest)
        warn_of_few(data, len(train), len(validation))
    all_lengths = LengthsOfData(lengths, of_validation)
    return Examples(train.shuffle(order), validation, measured, all_lengths, largest_id)


def _read(
    stage: Stage,
    data: DataSection,
    tokenizer: Any,
    room: int,
    rewards: Sequence[str | None],
    sources: Paths,
    name: str,
    seed: int,
) -> tuple[Dataset, list[tuple[str, Dataset]], RowLengths, int]:
    """The rows of all sources, the tokens of each source's first rows, all rows' lengths, and the
    largest id.
    """
    from datasets import Dataset

    chosen = listed(sources, name)
    for source in chosen:
        if source.template or data.template:
            raise DataError(
                f"data.template: stage {stage.name} uses fields unchanged; use data.columns"
            )
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)

    def open_readers() -> list[SourceReader]:
        formers = (
            StageFormer(stage, source.columns or data.columns, rewards, tokenizer)
            for source in chosen
        )
        return [
            SourceReader(source, data, seed + index, former)
            for index, (source, former) in enumerate(zip(chosen, formers, strict=True))
        ]

    places, rows = [], []
    fields = fields_read(stage, rewards)
    readers, formed_rows = rows_of(open_readers, data, name, seed, fields)
    for index, location, row in formed_rows:
        places.append((index, location))
        rows.append(row)
    table = prepared(stage, _table(rows, name), tokenizer, data, name)
    fitting, counts = _fitting(table, [location for _, location in places], tokenizer, data, room)
    if not fitting:
        added, remedy = "", "raise it"
        if room:
            added = f" with {room} tokens of trainer.max_completion_length"
            remedy = "raise it, or lower trainer.max_completion_length"
        raise DataError(
            f"data.{name}: all rows{added} are longer than data.max_length {data.max_length}; "
            f"{remedy}"
        )
    log.info("%s data: %d rows of %s", name, len(fitting), ", ".join(STAGE_FIELDS[stage.form]))
    reads, length = field_reader(tokenizer), data.max_length
    lines = [line for reader in readers for line in reader.former.turns.lines(reads)]
    if counts["begun"]:
        about = "{begin} with the special token that TRL adds, so {they} {have} it twice; remove it"
        begun = counts["begun"]
        lines.append(f"{counted(begun, 'text')} {in_number(about, begun)} from the texts")
    lines += unread_lines(set[str]().union(*(reader.unread for reader in readers)))
    malformed = [reader for reader in readers if reader.malformed]
    if malformed:
        count = sum(reader.malformed for reader in malformed)
        lines.append(said("malformed", count, first=malformed[0].first_malformed))
    if counts["truncated"]:
        cut = counts["cut"]
        lines.append(said("truncated", counts["truncated"], max_length=length, cut=cut))
    if count := counts["dropped"]:
        about = in_number("{are} longer than data.max_length %d and {were} dropped", count)
        lines.append(f"{counted(count, 'row')} {about % length}")
    for line in lines:
        log.warning("%s data: %s", name, line)
    measured: list[list[Row]] = [[] for _ in readers]
    for index in fitting:
        if len(part := measured[places[index][0]]) < MEASURED:
            part.append(measured_row(table[index], tokenizer, length))
    paths = [reader.source.path for reader in readers]
    parts = [(path, part) for path, part in zip(paths, measured, strict=True) if part]
    sources_measured = [(path, Dataset.from_list(part)) for path, part in parts]
    lengths = RowLengths(len(fitting), counts["longest"], counts["tokens"])
    return table.select(fitting), sources_measured, lengths, counts["largest_id"]


def prepared(stage: Stage, rows: Dataset, tokenizer: Any, data: DataSection, name: str) -> Dataset:
    """``rows`` as TRL's trainer prepares them, before it drops any: preferences with the columns
    ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, prompts as they are.
    """
    if stage.form == "prompts":
        return rows
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    options = SimpleNamespace(dataset_num_proc=data.num_proc, max_length=None)
    prepare = stage.trainer_class()._prepare_dataset
    table: Dataset = prepare(trainer, rows, tokenizer, options, name)
    return table


def ids_of(row: Row, tokenizer: Any) -> list[list[int]]:
    """TRL's tokens of a prepared row: of its prompt, then of its answers if there are any.

    GRPO makes those of a prompt when it generates.
    """
    if "prompt_ids" in row:
        return [row["prompt_ids"], *(row[f"{name}_ids"] for name in ANSWERS)]
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [tokenizer(prompt)["input_ids"]]
    chat = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return [chat["input_ids"]]


def _fitting(
    table: Dataset, locations: Sequence[str], tokenizer: Any, data: DataSection, room: int
) -> tuple[list[int], Counter[str]]:
    """The numbers of rows that are kept, their lengths, counts of the others, and the largest id.

    TRL's DPO truncates answers, and drops a row whose prompt leaves no token for them. Its GRPO
    truncates no prompt; one that leaves less than ``room`` tokens for its answer is dropped.
    """
    fitting = []
    counts = Counter[str](largest_id=0)
    limit = data.max_length
    twice = 2 * beginning_of(tokenizer)
    for index, (location, row) in enumerate(zip(locations, table, strict=True)):
        prompt, *answers = ids_of(row, tokenizer)
        texts = [prompt + answer for answer in answers] or [prompt]
        tokens = max(map(len, texts))
        longest = tokens + room
        counts["largest_id"] = max(counts["largest_id"], *(max(i, default=0) for i in texts))
        text = isinstance(row["prompt"], str)
        counts["begun"] += text and bool(twice) and prompt[: len(twice)] == twice
        if longest > limit:
            if data.overlong == "error":
                raise DataError(
                    f"{location}: {longest} tokens, longer than data.max_length {limit}; raise "
                    f"it, or set data.overlong: {'truncate or ' if answers else ''}drop"
                )
            if data.overlong == "drop" or not answers or len(prompt) >= limit:
                counts["dropped"] += 1
                continue
            counts["truncated"] += 1
            counts["cut"] += sum(max(0, len(ids) - limit) for ids in texts)
        fitting.append(index)
        tokens = min(tokens, limit)
        counts["longest"] = max(counts["longest"], tokens)
        counts["tokens"] += tokens
    return fitting, counts


def measured_row(row: Row, tokenizer: Any, end: int) -> Row:
    """Ids and labels of a prompt and its preferred answer, or of a prompt that has none."""
    prompt, *answers = ids_of(row, tokenizer)
    ids = prompt + answers[0] if answers else prompt
    labels = [IGNORED] * len(prompt) + ids[len(prompt) :] if answers else ids
    return {"input_ids": ids[:end], "labels": labels[:end]}


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
