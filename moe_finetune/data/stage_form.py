"""Rows of preferences, labels or prompts, checked and brought into their stage's form.

Forms: ``{"prompt", "chosen", "rejected"}``, ``{"prompt", "completion", "label"}`` and ``{"prompt",
...}`` with whatever other fields a reward reads. A text is taken as it is; a list of ``{"role",
"content"}`` turns goes through the chat template. A row that has none of them is refused with its
file and line.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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


class StageFormer:
    """Brings the rows of one source into a stage's form.

    Args:
        columns: our field -> the file's field.
    """

    def __init__(self, stage: Stage, columns: Mapping[str, str] | None = None):
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
        return row if self.form == "prompts" else {field: row[field] for field in self._fields}


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
