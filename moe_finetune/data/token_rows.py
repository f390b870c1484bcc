"""Rows of ``sft`` and ``pretrain``: ids and labels, which TRL's trainer only packs or pads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.data.chat import RenderingError
from moe_finetune.data.row_counts import SENTENCES, Counts, described
from moe_finetune.data.sources import SourceReader
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import IGNORED, Tokens, tokenize_row
from moe_finetune.data.turns import TurnCounts, each_answer, until_last_answer
from moe_finetune.errors import DataError
from moe_finetune.io.counted import counted
from moe_finetune.io.row_files import Row
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection, DataSource

if TYPE_CHECKING:
    from datasets import Dataset

_OF_TOKENS = [field.name for field in dataclasses.fields(Tokens) if field.name in SENTENCES]


@dataclass
class TokenRows:
    """A :class:`~moe_finetune.data.prepared_rows.Preparation` into ``input_ids`` and ``labels``.

    ``turns`` and ``unanswered`` count the rows that were read.
    """

    data: DataSection
    tokenizer: Tokenizer
    turns: TurnCounts = dataclasses.field(default_factory=TurnCounts)
    unanswered: int = 0
    fields = None
    plain = True

    def identity(self) -> list[Any]:
        return ["tokens"]

    def reader(self, source: DataSource, seed: int) -> SourceReader:
        return SourceReader(source, self.data, seed)

    def layout(self, source: DataSource) -> str:
        # Without the limit, whose draw would read the whole source.
        reader = self.reader(source.model_copy(update={"limit": None}), 0)
        next(iter(reader), None)
        detected: str = reader.former.detected
        return detected

    def examples(self, reader: SourceReader, location: str, row: Row) -> Iterator[Row]:
        """The row without turns after its last answer, or one example for each answer."""
        _check_form(reader.source.path, reader.former.form, self.data)
        used = row
        if "messages" in row:
            self.turns.add(row)
        if "messages" in row and self.data.completion_only_loss is not False:
            used = until_last_answer(row)
            self.unanswered += used is not row
        answers = each_answer(used) if self.data.turns == "each" and "messages" in row else []
        yield from answers or [used]

    def features(self) -> dict[str, Any]:
        from datasets import Value

        return {"input_ids": [Value("int32")], "labels": [Value("int32")]}

    def prepare(self, location: str, row: Row) -> Row:
        """Ids and labels of a row within ``max_length``, and what happened to it."""
        try:
            tokens = tokenize_row(row, self.tokenizer, self.data.completion_only_loss is not False)
        except RenderingError:
            if not row.get("opening"):
                raise
            tokens = Tokens([], [], unlocated=True)
        return self._within(tokens, location)

    def _within(self, tokens: Tokens, location: str) -> Row:
        data = self.data
        splits = data.packing and data.packing_strategy != "bfd"
        cut = 0 if splits else max(0, len(tokens.input_ids) - data.max_length)
        if cut and data.overlong == "error":
            raise DataError(
                f"{location}: {len(tokens.input_ids)} tokens, longer than data.max_length "
                f"{data.max_length}; raise it, or set data.overlong to truncate or drop"
            )
        end = len(tokens.input_ids) - cut
        learned = sum(label != IGNORED for label in tokens.labels[:end])
        unlearned = all(label == IGNORED for label in tokens.labels)
        dropped = not unlearned and (not learned or bool(cut and data.overlong == "drop"))
        if dropped or unlearned:
            end = learned = cut = 0
        notes = {"truncated": cut > 0, "dropped": dropped, "unlearned": unlearned}
        notes |= {name: getattr(tokens, name) for name in _OF_TOKENS}
        ids = tokens.input_ids[:end]
        return {
            "input_ids": ids,
            "labels": tokens.labels[:end],
            **described(
                happened=[name for name, holds in notes.items() if holds],
                tokens=end,
                learned=learned,
                cut=cut,
                largest=max(ids, default=0),
            ),
        }

    def add_notes(self, counts: Counts, readers: Sequence[SourceReader]) -> None:
        counts.notes["unanswered"] = self.unanswered
        counts.turns = self.turns.lines(field_reader(self.tokenizer))

    def none_fits(self, rows: int) -> str:
        return (
            f"of {counted(rows, 'row')}, none has a learned token within data.max_length "
            f"{self.data.max_length}; raise it"
        )

    def summary(self, counts: Counts) -> str:
        return (
            f"{counted(counts.rows, 'row')}, {counted(counts.tokens, 'token')}, "
            f"{counts.learned:,} of them learned"
        )

    def measured(self, rows: Dataset) -> Dataset:
        return rows


def _check_form(source: str, form: str, data: DataSection) -> None:
    if form == "text" and data.completion_only_loss:
        raise DataError(
            f"{source} contains plain texts, which have no completion to mask for; remove "
            "data.completion_only_loss=true"
        )
    if form != "text" and data.packing and data.packing_strategy != "bfd":
        raise DataError(
            f"{source} contains {form}, and data.packing_strategy '{data.packing_strategy}' "
            "splits examples; set it to 'bfd'"
        )
