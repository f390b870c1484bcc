"""Rows of training data, checked and brought into one of three forms.

Forms: ``{"messages": [{"role", "content"}, ...]}``, ``{"prompt", "completion"}``, ``{"text"}``.
A row that has none of them is refused with its file and line; nothing is skipped silently.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Literal

from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Row, short

Form = Literal["messages", "prompt_completion", "text"]

FIELDS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
QUESTION_TEMPLATE = {"prompt": "Question: {question}\nAnswer:", "completion": " {answer}"}
"""GSM8K's layout as lm-evaluation-harness asks it; used for ``question``/``answer`` rows."""
_ASKED = {"prompt": "{question}\nAnswer:", "completion": " {answer}"}
_ALPACA = {"prompt": "Instruction: {instruction}\nResponse:", "completion": " {output}"}
_ALPACA_INPUT = {
    "prompt": "Instruction: {instruction}\nInput: {input}\nResponse:",
    "completion": " {output}",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}


class Former:
    """Brings the rows of one source into a form, by the recipe's ``format`` and columns.

    Args:
        form: the recipe's ``data.format``; "auto" decides by the first row's fields.
        columns: our field -> the file's field.
        template: our field -> a text with the file's fields in braces; a list of texts is filled
            in with one a line.
    """

    def __init__(
        self,
        form: Form | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        template: Mapping[str, str] | None = None,
    ):
        self.form = form
        self.detected = ""
        self.columns = columns or {}
        self.template = template or {}
        ours = {field for fields in FIELDS.values() for field in fields}
        for name, mapping in (("columns", self.columns), ("template", self.template)):
            for field in mapping:
                if field not in ours:
                    raise DataError(f"data.{name}.{field}: unknown{did_you_mean(field, ours)}")
        for field, pattern in self.template.items():
            _names(pattern, f"data.template.{field}")

    def __call__(self, place: str, row: Row) -> Row:
        """The row in its form; raise DataError with ``place`` when it has none."""
        row = self._mapped(place, row)
        if self.form == "auto" and not self.detected:
            self.detected = " and ".join(FIELDS[_detect(place, row)])
        if self.form == "auto":
            self.form = _detect(place, row)
        if self.form == "messages":
            return {"messages": _messages(place, row)}
        for field in FIELDS[self.form]:
            if field not in row:
                raise DataError(
                    f"{place}: no field '{field}', wanted {' and '.join(FIELDS[self.form])} "
                    f"(data.format {self.form}); the row has {', '.join(row) or 'no fields'}"
                )
            if not isinstance(row[field], str):
                raise DataError(f"{place}: '{field}': wanted text, got {short(row[field])}")
        last = FIELDS[self.form][-1]
        if not row[last].strip():
            raise DataError(f"{place}: '{last}' is empty; there is nothing to learn from it")
        return {field: row[field] for field in FIELDS[self.form]}

    def _mapped(self, place: str, row: Row) -> Row:
        template = self.template
        if not template and not self.columns and not _has_form(row):
            if isinstance(row.get("conversations"), list):
                self.detected = "ShareGPT: 'conversations' are taken as messages"
                return {"messages": row["conversations"]}
            template = self._known(row)
        if template:
            return {
                f: _fill(text, row, f"{place}: data.template.{f}") for f, text in template.items()
            }
        return renamed(place, row, self.columns)

    def _known(self, row: Row) -> Mapping[str, str]:
        """The template of a layout that many data sets share; none for any other row."""
        if {"question", "answer"} <= row.keys():
            asked = str(row["question"]).lstrip().startswith("Question:")
            template = _ASKED if asked else QUESTION_TEMPLATE
            self.detected = self.detected or _wrapped("question and answer", template)
            return template
        if {"instruction", "output"} <= row.keys():
            more = row.get("input")
            if self.form == "messages":  # the chat template says who speaks
                asked_with = "{instruction}\n\n{input}" if more else "{instruction}"
                self.detected = "Alpaca: instruction, input and output are taken as a chat"
                return {"prompt": asked_with, "completion": "{output}"}
            template = _ALPACA_INPUT if more else _ALPACA
            self.detected = self.detected or _wrapped("Alpaca", template)
            return template
        return {}


def renamed(place: str, row: Row, columns: Mapping[str, str]) -> Row:
    """The row with ``columns`` (our field -> the file's field) beside its own fields."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(
                f"{place}: no field '{theirs}' (data.columns.{ours})"
                f"{did_you_mean(theirs, map(str, row))}"
            )
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}


def _wrapped(name: str, template: Mapping[str, str]) -> str:
    text = template["prompt"] + template["completion"]
    return f"{name}, wrapped as {text!r}; data.template changes that"


def _has_form(row: Row) -> bool:
    return any(set(fields) <= row.keys() for fields in FIELDS.values())


def _detect(place: str, row: Row) -> Form:
    found: list[Form] = [form for form, fields in FIELDS.items() if set(fields) <= row.keys()]
    if len(found) == 1:
        form = found[0]
        return "messages" if form == "prompt_completion" and _is_chat(row) else form
    has = f"the row has {', '.join(map(str, row)) or 'no fields'}"
    if found:
        raise DataError(f"{place}: fits {' and '.join(found)}; set data.format. {has}")
    raise DataError(
        f"{place}: wanted 'messages', 'conversations' (ShareGPT), 'prompt' and 'completion', "
        f"'instruction' and 'output' (Alpaca), 'question' and 'answer', or 'text'; {has}. "
        "Name yours with data.columns, for example data.columns={prompt: ask, completion: reply}"
    )


def _is_chat(row: Row) -> bool:
    return isinstance(row["prompt"], list) and isinstance(row["completion"], list)


def _messages(place: str, row: Row) -> list[dict[str, str]]:
    """The row's turns, checked; a prompt and a completion become a user and an assistant turn."""
    turns = row.get("messages")
    if turns is None and {"prompt", "completion"} <= row.keys():
        if _is_chat(row):
            turns = row["prompt"] + row["completion"]
        else:
            turns = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: 'messages': wanted a list of turns, got {short(turns)}")
    checked = []
    for number, turn in enumerate(turns):
        where = f"{place}: messages[{number}]"
        if not isinstance(turn, dict):
            raise DataError(f"{where}: wanted {{role, content}}, got {short(turn)}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = _SHAREGPT.get(str(role), role)
        if role not in ROLES:
            raise DataError(f"{where}: role {role!r}{did_you_mean(str(role), ROLES)}")
        if not isinstance(content, str):
            raise DataError(f"{where}: content: wanted text, got {short(content)}")
        if role == "assistant" and not content.strip():
            raise DataError(f"{where}: the assistant's content is empty")
        checked.append({"role": role, "content": content})
    if checked[-1]["role"] != "assistant":
        raise DataError(
            f"{place}: the last message is from '{checked[-1]['role']}'; wanted the assistant's "
            "answer, which is what is learned"
        )
    return checked


def _names(pattern: str, place: str) -> list[str]:
    """Fields in braces; plain names only, because a format string can reach into objects."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise DataError(f"{place}: {error}; write a literal brace twice") from error
    for name in names:
        if not name.isidentifier():
            raise DataError(f"{place}: '{{{name}}}' is not a field's name")
    return names


def _fill(pattern: str, row: Row, place: str) -> str:
    for name in _names(pattern, place):
        if name not in row:
            raise DataError(f"{place}: no field '{name}'{did_you_mean(name, map(str, row))}")
    lines = {k: "\n".join(v) for k, v in row.items() if _is_lines(v)}
    return pattern.format_map({**row, **lines})


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)
