"""Rows of preferences or prompts, checked and brought into their stage's form.

Forms: ``{"prompt", "chosen", "rejected"}`` and ``{"prompt", ...}`` with any other fields that a
reward reads. A text is used unchanged; a list of turns goes
through the chat template with the row's ``tools`` and ``variables``, see
:mod:`moe_finetune.data.turns`. A row that has none of them is refused with its file and line.
"""

import itertools
from collections.abc import Mapping, Sequence

from moe_finetune.data.rows import renamed
from moe_finetune.data.turns import conversation
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Row, short
from moe_finetune.recipe.stages import Stage

FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
_BESIDE = ("tools", "functions", "system", "chat_template_kwargs", "images", "image", "videos",
           "audios")  # fmt: skip
READ_BY = {"exact_match": "answer", "boxed": "answer", "code": "tests"}
"""Reward -> the field that it reads in a row."""


class StageFormer:
    """Brings the rows of one source into a stage's form.

    Args:
        columns: our field -> the file's field.
        rewards: names of rewards, whose fields each row must have.

    Attributes:
        unread: columns with values that nothing has read so far; rewards may read any.
    """

    def __init__(
        self,
        stage: Stage,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[str | None] = (),
    ):
        self.unread: set[str] = set()
        self._read = {READ_BY[name]: name for name in rewards if name in READ_BY}
        self.form: str = stage.form
        self.detected = ""
        self.columns = columns or {}
        self._fields = FIELDS[stage.form]
        for field in self.columns:
            if field not in self._fields and stage.form != "prompts":
                raise DataError(f"data.columns.{field}: unknown{did_you_mean(field, self._fields)}")

    def __call__(self, location: str, row: Row) -> Row:
        """Return the row in its form; raise DataError with ``location`` if it has none."""
        names, row = list(row), _published(renamed(location, row, self.columns))
        if self.form == "preference" and "prompt" not in row:
            row = {**row, **_common_prompt(location, row)}
        for field in self._fields:
            if field not in row:
                raise DataError(
                    f"{location}: no field '{field}'; a row needs {', '.join(self._fields)}, "
                    f"and this one has {', '.join(map(str, names)) or 'no fields'}. Map your "
                    "fields with data.columns"
                    + (", or set stage: sft" if {"messages", "completion"} & set(names) else "")
                )
        if len({type(row[field]) for field in self._fields}) > 1:
            raise DataError(
                f"{location}: {', '.join(self._fields)} mix texts and turns; use only texts, or "
                "only lists of {role, content}"
            )
        formed = {field: row[field] for field in self._fields}
        for field in self._fields:
            formed |= self._checked(location, field, row)
        if self.form == "preference" and row["chosen"] == row["rejected"]:
            raise DataError(
                f"{location}: 'chosen' and 'rejected' are equal, so neither is preferred; remove "
                "the row"
            )
        for field, reward in self._read.items():
            _check_read(location, row, field, reward)
        read = {*self._fields, *self.columns.values(), *_BESIDE}
        self.unread.update(k for k, v in row.items() if k not in read and v not in (None, "", []))
        return {**row, **formed} if self.form == "prompts" else formed

    def _checked(self, location: str, field: str, row: Row) -> Row:
        """A checked field of texts or turns, with the tools and variables that a template reads."""
        value, answer = row[field], field != "prompt"
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"{location}: '{field}' is empty")
            return {field: value}
        if not isinstance(value, list) or not value:
            raise DataError(
                f"{location}: '{field}': must be text or a list of turns, not {short(value)}"
            )
        extras = {} if answer else {name: row[name] for name in _BESIDE if name in row}
        formed = conversation(location, value, extras, field)
        turns = formed.pop("messages")
        last = turns[-1]["role"]
        if answer and last != "assistant":
            raise DataError(
                f"{location}: '{field}': the last turn is from '{last}', but it must be the "
                "assistant's answer"
            )
        if not answer and last == "assistant":
            raise DataError(
                f"{location}: '{field}': ends with the assistant's turn, but it must end with "
                "the turn to answer"
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
        return {field: [_without_train(turn) for turn in turns], **formed}


def _check_read(location: str, row: Row, field: str, reward: str) -> None:
    """Refuse a row whose ``field`` the named reward cannot read."""
    if field not in row:
        known = f"{', '.join(map(str, row))}{did_you_mean(field, row)}"
        raise DataError(
            f"{location}: no field '{field}', which rewards: '{reward}' reads; the row has "
            f"{known.removesuffix('?')}; map your fields with data.columns: {{{field}: ...}}"
        )
    value = row[field]
    if field == "tests":
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list) and bool(texts)
        good = good and all(isinstance(text, str) and _has_code(text) for text in texts)
        expected = "Python code or a list of such texts"
    else:
        good = isinstance(value, str | int | float) and bool(str(value).strip())
        expected = "text or a number"
    if not good:
        raise DataError(
            f"{location}: '{field}': must be {expected}, which rewards: '{reward}' reads, not "
            f"{short(value)}"
        )


def _has_code(text: str) -> bool:
    """Return whether a test contains code; any program passes an empty one."""
    lines = (line.strip() for line in text.splitlines())
    return any(line and not line.startswith("#") and line != "pass" for line in lines)


def _common_prompt(location: str, row: Row) -> Row:
    """Split two whole conversations into their common first turns, the prompt, and the answers."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return {}
    common = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                                zip(chosen, rejected, strict=False))]  # fmt: skip
    if not common or len(common) in (len(chosen), len(rejected)):
        raise DataError(
            f"{location}: 'chosen' and 'rejected' must start with the same turns and then "
            "differ; add the field 'prompt'"
        )
    cut = len(common)
    return {"prompt": common, "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _published(row: Row) -> Row:
    """Rename OpenAI's and ShareGPT's fields of preferences to ours."""
    row = dict(row)
    if isinstance(row.get("input"), dict) and {"preferred_output", "non_preferred_output"} <= set(
        row
    ):
        request = row.pop("input")
        row |= {"prompt": request.get("messages"), "tools": request.get("tools")}
        row["chosen"] = row.pop("preferred_output")
        row["rejected"] = row.pop("non_preferred_output")
    turns = row.get("messages", row.get("conversations"))
    if "prompt" not in row and isinstance(turns, list):
        row.pop("messages", row.pop("conversations", None))
        row["prompt"] = turns
    for field in ("chosen", "rejected"):
        if isinstance(row.get(field), dict):
            row[field] = [row[field]]
    return row


def _without_train(turn: Row) -> Row:
    return {name: value for name, value in turn.items() if name != "train"}
