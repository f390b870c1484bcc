"""Rows of preferences and prompts, checked and brought into the columns that TRL reads.

A text is used unchanged; turns are those of :mod:`moe_finetune.data.turns`, with the row's
``tools`` and ``chat_template_kwargs``. A row that lacks a column, or that a reward
cannot read, is refused with its file and line.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_finetune.data.row_forms import (
    STAGE_FIELDS,
    check_fields,
    columns_of,
    renamed,
    with_values,
)
from moe_finetune.data.turns import COLUMNS, TurnCounts, conversation
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.row_files import Row, short
from moe_finetune.recipe.stages import Stage

ANSWERS = ("chosen", "rejected")
READ_BY = {"exact_match": "answer", "boxed": "answer", "code": "tests"}
"""Reward -> the field that it reads in a row."""


class StageFormer:
    """Brings the rows of one source into a stage's form, and notes what a log line is about:
    ``unread`` columns and ``turns``.
    """

    def __init__(
        self,
        stage: Stage,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[str | None] = (),
    ):
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
