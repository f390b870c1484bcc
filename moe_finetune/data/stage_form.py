"""Rows of preferences, labels or prompts, checked and brought into their stage's form.

Forms: ``{"prompt", "chosen", "rejected"}``, ``{"prompt", "completion", "label"}`` and ``{"prompt",
...}`` with whatever other fields a reward reads. A text is taken as it is; a list of ``{"role",
"content"}`` turns goes through the chat template. A row that has none of them is refused with its
file and line.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from moe_finetune.data.rows import ROLES, renamed
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Row, short
from moe_finetune.recipe.stages import Stage

FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}
READ_BY = {"exact_match": "answer", "boxed": "answer", "code": "tests"}
"""Rewards by name, and the field that each reads of a row."""


class StageFormer:
    """Brings the rows of one source into a stage's form.

    Args:
        columns: our field -> the file's field.
        rewards: by name, whose fields each row must have.
    """

    def __init__(
        self,
        stage: Stage,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[str | None] = (),
    ):
        self._read = {READ_BY[name]: name for name in rewards if name in READ_BY}
        self.form: str = stage.form
        self.detected = ""
        self.columns = columns or {}
        self._fields = FIELDS[stage.form]
        for field in self.columns:
            if field not in self._fields and stage.form != "prompts":
                raise DataError(f"data.columns.{field}: unknown{did_you_mean(field, self._fields)}")

    def __call__(self, place: str, row: Row) -> Row:
        """The row in its form; raise DataError with ``place`` when it has none."""
        row = renamed(place, row, self.columns)
        if self.form == "preference" and "prompt" not in row:
            row = {**row, **_common_prompt(place, row)}
        for field in self._fields:
            if field not in row:
                raise DataError(
                    f"{place}: no field '{field}', wanted {' and '.join(self._fields)}; the row "
                    f"has {', '.join(map(str, row)) or 'no fields'}. Name yours with data.columns"
                )
        texts = [field for field in self._fields if field != "label"]
        for field in texts:
            _check_text(f"{place}: '{field}'", row[field], answer=field != "prompt")
        if len({type(row[field]) for field in texts}) > 1:
            raise DataError(
                f"{place}: {', '.join(texts)} are texts and turns mixed; wanted all texts, or all "
                "lists of {role, content}"
            )
        if "label" in self._fields and not isinstance(row["label"], bool):
            raise DataError(f"{place}: 'label': wanted true or false, got {short(row['label'])}")
        if self.form == "preference" and row["chosen"] == row["rejected"]:
            raise DataError(f"{place}: 'chosen' and 'rejected' are equal; nothing is preferred")
        for field, reward in self._read.items():
            _check_read(place, row, field, reward)
        return row if self.form == "prompts" else {field: row[field] for field in self._fields}


def _check_read(place: str, row: Row, field: str, reward: str) -> None:
    """Refuse a row whose ``field`` the reward of this name cannot read."""
    if field not in row:
        raise DataError(
            f"{place}: no field '{field}', which rewards: '{reward}' reads; the row has "
            f"{', '.join(map(str, row))}{did_you_mean(field, row)}. Name yours with "
            f"data.columns: {{{field}: ...}}"
        )
    value = row[field]
    if field == "tests":
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list) and bool(texts) and all(isinstance(t, str) for t in texts)
        wanted = "text, or a list of texts"
    else:
        good = isinstance(value, str | int | float) and bool(str(value).strip())
        wanted = "text or a number"
    if not good:
        raise DataError(
            f"{place}: '{field}': wanted {wanted}, which rewards: '{reward}' reads, got "
            f"{short(value)}"
        )


def _common_prompt(place: str, row: Row) -> Row:
    """Prompt and answers of two whole conversations: the turns that both begin with."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return {}
    common = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                                zip(chosen, rejected, strict=False))]  # fmt: skip
    if not common or len(common) in (len(chosen), len(rejected)):
        raise DataError(
            f"{place}: 'chosen' and 'rejected' do not begin with the same turns and then differ; "
            "add the field 'prompt'"
        )
    cut = len(common)
    return {"prompt": common, "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _check_text(where: str, value: Any, answer: bool) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty")
        return
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: wanted text or a list of turns, got {short(value)}")
    for number, turn in enumerate(value):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise DataError(f"{where}[{number}]: wanted {{role, content}}, got {short(turn)}")
        if turn.get("role") not in ROLES:
            role = turn.get("role")
            raise DataError(f"{where}[{number}]: role {role!r}{did_you_mean(str(role), ROLES)}")
    last = value[-1]["role"]
    if answer and last != "assistant":
        raise DataError(f"{where}: the last turn is from '{last}'; wanted the assistant's answer")
    if not answer and last == "assistant":
        raise DataError(f"{where}: ends with the assistant's turn; wanted what it answers to")
