"""Rows of preferences and prompts, with the tokens that TRL's trainers make of them.

Turns get the form of which the chat template omits nothing; a row of which it would omit a part is
refused. The tokens of preferences are made by functions of TRL's DPO trainer, from which they are
taken once; GRPO's trainer makes those of a prompt when it generates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moe_finetune.data.column_types import ColumnTypes, as_json
from moe_finetune.data.preference_and_prompt_forms import ANSWERS, StageFormer, fields_read
from moe_finetune.data.row_counts import Counts, described
from moe_finetune.data.row_forms import STAGE_FIELDS
from moe_finetune.data.sources import SourceReader
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import IGNORED, beginning_of, ends_a_turn, rendered
from moe_finetune.errors import DataError
from moe_finetune.io.counted import counted
from moe_finetune.io.row_files import Row
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection, DataSource
from moe_finetune.recipe.stages import Stage

if TYPE_CHECKING:
    from datasets import Dataset

Step = Callable[[Row], Mapping[str, Any]]
"""A function of TRL that changes or adds columns of one row."""
MEASURED = 256
"""Number of rows per source on which routing is measured."""
_TURNS = ("prompt", *ANSWERS, "chat_template_kwargs")
"""Columns that are stored as they are: a table would give all objects one's fields."""


@dataclass
class StageRows:
    """A :class:`~moe_finetune.data.prepared_rows.Preparation` for a trainer that tokenizes.

    Attributes:
        room: tokens that the trainer adds to a prompt.
        rewards: names of the rewards; None for one that may read any column.
        steps: of :func:`steps_of`.
        types: of the columns of the rows that were read.
        columns: of the prepared rows, when all were read.
    """

    stage: Stage
    data: DataSection
    tokenizer: Tokenizer
    room: int = 0
    rewards: Sequence[str | None] = ()
    steps: Mapping[bool, Sequence[Step]] = dataclasses.field(default_factory=dict)
    types: ColumnTypes = dataclasses.field(default_factory=ColumnTypes)
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain = False

    @property
    def fields(self) -> Collection[str] | None:
        return fields_read(self.stage, self.rewards)

    def identity(self) -> list[Any]:
        return [self.stage.form, self.room, list(self.rewards)]

    def layout(self, source: DataSource) -> str:
        return ""

    def reader(self, source: DataSource, seed: int) -> SourceReader:
        if source.template or self.data.template:
            raise DataError(
                f"data.template: stage {self.stage.name} uses fields unchanged; use data.columns"
            )
        columns = source.columns or self.data.columns
        return SourceReader(source, self.data, seed, StageFormer(self.stage, columns, self.rewards))

    def examples(self, reader: SourceReader, location: str, row: Row) -> Iterator[Row]:
        self.types.add(self._with_tools_as_text(row))
        yield row

    def features(self) -> dict[str, Any]:
        from datasets import Value

        if not self.columns:
            self.columns = self.types.features(_TURNS)
            for name in ("prompt", *ANSWERS) if self.stage.form == "preference" else ():
                self.columns[f"{name}_ids"] = [Value("int32")]
        return self.columns

    def prepare(self, location: str, row: Row) -> Row:
        """The row's columns with TRL's tokens, and whether they fit.

        DPO truncates answers, and drops a row whose prompt leaves no token for them. GRPO truncates
        no prompt; one that leaves less than ``room`` tokens for its answer is dropped.
        """
        row = self._rendered(row)
        for step in self.steps.get(isinstance(row["prompt"], str), ()):
            row = {**row, **step(dict(row))}
        prompt, *answers = ids_of(row, self.tokenizer)
        texts = [prompt + answer for answer in answers] or [prompt]
        tokens, limit = max(map(len, texts)), self.data.max_length
        happened, cut = [], 0
        twice = 2 * beginning_of(self.tokenizer)
        if isinstance(row["prompt"], str) and twice and prompt[: len(twice)] == twice:
            happened.append("begun")
        if not isinstance(row["prompt"], str) and not all(
            ends_a_turn(answer, self.tokenizer) for answer in answers
        ):
            happened.append("endless")
        if tokens + self.room > limit:
            if self.data.overlong == "error":
                raise DataError(
                    f"{location}: {tokens + self.room} tokens, longer than data.max_length "
                    f"{limit}; raise it, or set data.overlong: "
                    f"{'truncate or ' if answers else ''}drop"
                )
            if self.data.overlong == "drop" or not answers or len(prompt) >= limit:
                happened.append("too_long")
                tokens = 0
            else:
                happened.append("truncated")
                cut = sum(max(0, len(ids) - limit) for ids in texts)
        return self._stored(location, row) | described(
            happened=happened,
            tokens=min(tokens, limit),
            learned=0,
            cut=cut,
            largest=max(max(ids, default=0) for ids in texts),
        )

    def _rendered(self, row: Row) -> Row:
        """The row with turns in the form that TRL renders without loss."""
        prompt, answers = row["prompt"], ANSWERS if self.stage.form == "preference" else ()
        if isinstance(prompt, str):
            if answers and self.tokenizer.eos_token is None:
                raise DataError(
                    "TRL ends an answer with the tokenizer's end, and this tokenizer has none; "
                    "choose another model.tokenizer"
                )
            return row
        options = {"tools": row.get("tools"), "variables": row.get("chat_template_kwargs")}
        chat = {"messages": prompt, **options}
        row = {**row, "prompt": rendered(chat, self.tokenizer, True)[1]}
        for name in answers:
            _, turns = rendered({**chat, "messages": prompt + row[name]}, self.tokenizer)
            row[name] = turns[len(prompt) :]
        return self._with_tools_as_text(row)

    def _with_tools_as_text(self, row: Row) -> Row:
        """The row as TRL's DPO takes its tools: a table would add null to their schemas."""
        if self.stage.form != "preference" or "tools" not in row:
            return row
        return {**row, "tools": json.dumps(row["tools"])}

    def _stored(self, location: str, row: Row) -> Row:
        """The row's values in the types of its columns."""
        from datasets import Json

        stored = {}
        for name, kind in self.features().items():
            value = row.get(name)
            if isinstance(kind, Json):
                if name == "chat_template_kwargs" and name not in row:
                    value = {}  # TRL passes it on as keywords
                try:
                    value = None if value is None else as_json(value)
                except (TypeError, ValueError, OverflowError) as error:
                    raise DataError(f"{location}: '{name}' cannot be stored: {error}") from error
            stored[name] = value
        return stored

    def add_notes(self, counts: Counts, readers: Sequence[SourceReader]) -> None:
        reads = field_reader(self.tokenizer)
        counts.turns = [line for reader in readers for line in reader.former.turns.lines(reads)]

    def none_fits(self, rows: int) -> str:
        added, remedy = "", "raise it"
        if self.room:
            added = f" with {self.room} tokens of trainer.max_completion_length"
            remedy = "raise it, or lower trainer.max_completion_length"
        return f"all rows{added} are longer than data.max_length {self.data.max_length}; {remedy}"

    def summary(self, counts: Counts) -> str:
        fields = ", ".join(STAGE_FIELDS[self.stage.form])
        return f"{counted(sum(counts.sources), 'row')} of {fields}"

    def measured(self, rows: Dataset) -> Dataset:
        """Of the first rows."""
        from datasets import Dataset

        first = rows.select(range(min(MEASURED, len(rows))))
        length = self.data.max_length
        return Dataset.from_list([measured_row(row, self.tokenizer, length) for row in first])


class _OneRow:
    """Stands for a table where TRL prepares one: notes the functions that are mapped over it."""

    def __init__(self, row: Row):
        self.row = row
        self.steps: list[Step] = []

    def __iter__(self) -> Iterator[Row]:
        yield self.row

    def map(self, function: Step, fn_kwargs: Mapping[str, Any]) -> _OneRow:
        self.steps.append(functools.partial(function, **fn_kwargs))
        return self


def steps_of(stage: Stage, tokenizer: Tokenizer) -> dict[bool, list[Step]]:
    """What TRL's trainer does with a row of turns (False) and of texts (True) before it drops any.

    Called on every rank, and before the cache's lock is taken: TRL lets ranks wait for each other.
    """
    if stage.form == "prompts":
        return {}
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    options = SimpleNamespace(dataset_num_proc=None, max_length=None)
    prepare = stage.trainer_class()._prepare_dataset
    steps = {}
    for text in (False, True):
        row = {name: "a" if text else [{"role": "user", "content": "a"}]
               for name in STAGE_FIELDS[stage.form]}  # fmt: skip
        noted = _OneRow(row)
        prepare(trainer, noted, tokenizer, options, "train")
        steps[text] = noted.steps
    return steps


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


def measured_row(row: Row, tokenizer: Any, end: int) -> Row:
    """Ids and labels of a prompt and its preferred answer, or of a prompt that has none."""
    prompt, *answers = ids_of(row, tokenizer)
    ids = prompt + answers[0] if answers else prompt
    labels = [IGNORED] * len(prompt) + ids[len(prompt) :] if answers else ids
    return {"input_ids": ids[:end], "labels": labels[:end]}
