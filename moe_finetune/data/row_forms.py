"""Rows of training data, checked and brought into one of three forms.

Forms: ``{"messages": [{"role", "content", ...}, ...]}`` with ``tools`` and ``variables`` where the
row has them, see :mod:`moe_finetune.data.turns`; ``{"prompt", "completion"}``; ``{"text"}``.
A row that has none of them is refused with its file and line; nothing is skipped silently.
"""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moe_finetune.data.turns import COLUMNS, conversation, unlearned
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.row_files import Row, short

Form = Literal["messages", "prompt_completion", "text"]

FIELDS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
STAGE_FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
"""Form of a stage's rows -> the fields that each has; see :mod:`moe_finetune.recipe.stages`."""
QUESTION_TEMPLATE = {"prompt": "Question: {question}\nAnswer:", "completion": " {answer}"}
"""GSM8K's prompt in lm-evaluation-harness, for ``question``/``answer`` rows."""
_ASKED = {"prompt": "{question}\nAnswer:", "completion": " {answer}"}
_ALPACA = {"prompt": "Instruction: {instruction}\nResponse:", "completion": " {output}"}
_ALPACA_INPUT = {
    "prompt": "Instruction: {instruction}\nInput: {input}\nResponse:",
    "completion": " {output}",
}


class Former:
    """Brings the rows of one source into a form, by the recipe's ``format`` and columns.

    ``template`` makes a field of a text with the file's fields in braces, a list one line per item;
    ``unread`` are the columns with values that nothing has read so far.
    """

    def __init__(
        self,
        form: Form | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        template: Mapping[str, str] | None = None,
    ):
        self.form = form
        self.detected = ""
        self.unread: set[str] = set()
        self.columns = columns or {}
        self.template = template or {}
        ours = {field for fields in FIELDS.values() for field in fields} | set(COLUMNS)
        for name, mapping in (("columns", self.columns), ("template", self.template)):
            for field in mapping:
                if field not in ours:
                    raise DataError(f"data.{name}.{field}: unknown{did_you_mean(field, ours)}")
        check_template(self.template)

    def __call__(self, location: str, row: Row) -> Row:
        """Return the row in its form; raise DataError with ``location`` if it has none."""
        all_fields, row = row, self._mapped(location, row)
        if self.form == "auto":
            self.form = _detect(location, row)
            self.detected = self.detected or " and ".join(FIELDS[self.form])
        self.unread |= with_values(all_fields) - self._read(all_fields)
        if self.form == "messages":
            return self._conversation(location, row)
        for field in FIELDS[self.form]:
            if field not in row:
                raise DataError(
                    f"{location}: no field '{field}'; data.format {self.form} needs "
                    f"{' and '.join(FIELDS[self.form])}, and the row has "
                    f"{', '.join(row) or 'no fields'}"
                )
            if not isinstance(row[field], str):
                raise DataError(f"{location}: '{field}': must be text, not {short(row[field])}")
        last = FIELDS[self.form][-1]
        if not row[last].strip():
            raise DataError(f"{location}: '{last}' is empty, so the row has nothing to learn")
        return {field: row[field] for field in FIELDS[self.form]}

    def _read(self, row: Row) -> set[str]:
        """Columns of ``row`` that its form is made from."""
        template = self.template
        if not template and not self.columns and not _has_form(row) and "conversations" not in row:
            template = _known(row, self.form == "messages")[1]
        read = columns_of(self.columns)
        for pattern in template.values():
            read.update(_names(pattern, "data.template"))
        if self.form == "messages":
            return read.union(COLUMNS, ("conversations", "prompt", "completion"))
        return read if template or self.form == "auto" else read.union(FIELDS[self.form])

    def _conversation(self, location: str, row: Row) -> Row:
        """The row's turns; a prompt and a completion become a user and an assistant turn."""
        turns = row.get("messages")
        if turns is None and {"prompt", "completion"} <= row.keys():
            if _is_chat(row):
                turns = unlearned(row["prompt"]) + row["completion"]
            else:
                turns = [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ]
        return conversation(location, turns, row)

    def _mapped(self, location: str, row: Row) -> Row:
        template = self.template
        if not template and not self.columns and not _has_form(row):
            if isinstance(row.get("conversations"), list | str):
                self.detected = "ShareGPT: 'conversations' are read as messages"
                return {**row, "messages": row["conversations"]}
            name, template = _known(row, self.form == "messages")
            self.detected = self.detected or name
            if template and row.get("history"):
                raise DataError(
                    f"{location}: 'history': the earlier turns of this layout are not read; write "
                    "the row as messages, or remove the column"
                )
        if template:
            # A chat built from columns may also have tools and a system prompt.
            extras = {
                name: row[name] for name in COLUMNS if name in row and self.form == "messages"
            }
            return {**extras, **filled(location, row, template)}
        return renamed(location, row, self.columns)


def columns_of(columns: Mapping[str, str]) -> set[str]:
    """The file's columns that ``columns`` names, also by a field in one."""
    return {*columns.values(), *(column.partition(".")[0] for column in columns.values())}


def with_values(row: Row) -> set[str]:
    """Columns of ``row`` that are not empty."""
    return {name for name, value in row.items() if value not in (None, "", [])}


def renamed(location: str, row: Row, columns: Mapping[str, str]) -> Row:
    """The row with ``columns`` (our field -> the file's field, or a field in one) added."""
    return {**row, **{ours: _value(location, row, ours, c) for ours, c in columns.items()}}


def _value(location: str, row: Row, ours: str, column: str) -> Any:
    """A column, or a field in it (``reward_model.ground_truth``)."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise DataError(
                f"{location}: no field '{column}' (data.columns.{ours})"
                f"{did_you_mean(column, map(str, row))}"
            )
        value = value[name]
    return value


def _known(row: Row, chat: bool) -> tuple[str, Mapping[str, str]]:
    """The name and template of a common published layout; empty for any other row."""
    if {"question", "answer"} <= row.keys():
        has_prefix = str(row["question"]).lstrip().startswith("Question:")
        name, template = "question and answer", _ASKED if has_prefix else QUESTION_TEMPLATE
    elif {"instruction", "output"} <= row.keys():
        more = row.get("input")
        if chat:  # the chat template writes the speaker
            asked_with = "{instruction}\n\n{input}" if more else "{instruction}"
            name = "Alpaca: instruction, input and output are read as a chat"
            return name, {"prompt": asked_with, "completion": "{output}"}
        name, template = "Alpaca", _ALPACA_INPUT if more else _ALPACA
    else:
        return "", {}
    text = template["prompt"] + template["completion"]
    return f"{name}, wrapped as {text!r}; set data.template to change that", template


def _has_form(row: Row) -> bool:
    return any(set(fields) <= row.keys() for fields in FIELDS.values())


def _detect(location: str, row: Row) -> Form:
    fitting: list[Form] = [form for form, fields in FIELDS.items() if set(fields) <= row.keys()]
    if len(fitting) == 1:
        form = fitting[0]
        return "messages" if form == "prompt_completion" and _is_chat(row) else form
    has = f"the row has {', '.join(map(str, row)) or 'no fields'}"
    if not fitting and {"chosen", "rejected"} <= row.keys():
        raise DataError(
            f"{location}: a row of preferences ('chosen', 'rejected'): set stage: dpo (init writes "
            "such a recipe with --stage dpo)"
        )
    if fitting:
        raise DataError(f"{location}: could be {' or '.join(fitting)}; set data.format. {has}")
    raise DataError(
        f"{location}: needs 'messages', 'conversations' (ShareGPT), 'prompt' and 'completion', "
        f"'instruction' and 'output' (Alpaca), 'question' and 'answer', or 'text'; {has}. "
        f"{_remedy(row)}"
    )


def _remedy(row: Row) -> str:
    """How the fields of a row without a form become one, with their own names."""
    for name, value in row.items():
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            continue
        if _has_form(value[0]) or _known(value[0], False)[0] or "conversations" in value[0]:
            return f"The rows are inside '{name}': write that list alone into the file"
        if {"role", "from"} & value[0].keys():
            return f"Map your fields with data.columns: data.columns={{messages: {name}}}"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if len(texts) < 2:
        example = texts[0] if texts else "FIELD"
        return f"Map your fields with data.columns: data.columns={{text: {example}}}"
    columns = f"{{prompt: {texts[0]}, completion: {texts[1]}}}"
    return f"Map your fields with data.columns, for example data.columns={columns}"


def check_fields(
    location: str, names: Sequence[str], row: Row, form: str, columns: Mapping[str, str]
) -> None:
    """Refuse a row without a field of its stage's form, and guess the columns to set.

    Args:
        names: the file's own fields; ``row`` also has those of ``columns``.
    """
    fields = STAGE_FIELDS[form]
    missing = [field for field in fields if field not in row]
    if not missing:
        return
    remedy = "Map your fields with data.columns"
    if {"messages", "completion"} & set(names):
        remedy += ", or set stage: sft"
    else:
        reserved = {*fields, *columns_of(columns), "answer", "tests"}  # rewards read the last two
        texts = [
            name for name in names if name not in reserved and isinstance(row[name], str | list)
        ]
        if len(texts) >= len(missing):
            pairs = {**columns, **dict(zip(missing, texts, strict=False))}
            mapped = ", ".join(f"{ours}: {pairs[ours]}" for ours in fields if ours in pairs)
            remedy += f", for example data.columns={{{mapped}}}"
    raise DataError(
        f"{location}: no field '{missing[0]}'; a row needs {', '.join(fields)}, and this one has "
        f"{', '.join(map(str, names)) or 'no fields'}. {remedy}"
    )


def _is_chat(row: Row) -> bool:
    return all(
        isinstance(row[name], list) and all(isinstance(turn, dict) for turn in row[name])
        for name in ("prompt", "completion")
    )


def _names(pattern: str, location: str) -> list[str]:
    """Fields in braces; plain names only, because a format string can reach into objects."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise DataError(f"{location}: {error}; double literal braces") from error
    for name in names:
        if not name.isidentifier():
            raise DataError(f"{location}: '{{{name}}}' is not a field name")
    return names


def check_template(template: Mapping[str, str]) -> None:
    """Refuse a text of ``data.template`` that no row can fill."""
    for field, pattern in template.items():
        _names(pattern, f"data.template.{field}")


def filled(location: str, row: Row, template: Mapping[str, str]) -> Row:
    """The fields that ``data.template`` makes of a row's; one that the row lacks is refused."""
    return {
        name: _fill(text, row, f"{location}: data.template.{name}")
        for name, text in template.items()
    }


def _fill(pattern: str, row: Row, location: str) -> str:
    for name in _names(pattern, location):
        if name not in row:
            raise DataError(f"{location}: no field '{name}'{did_you_mean(name, map(str, row))}")
        if isinstance(row[name], float) and not math.isfinite(row[name]):
            raise DataError(f"{location}: '{name}': is {row[name]}, not a text")
    lines = {k: "\n".join(v) for k, v in row.items() if _is_lines(v)}
    return pattern.format_map({**row, **lines})


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)
