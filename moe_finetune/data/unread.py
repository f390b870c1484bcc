"""Fields of turns that a chat template does not read.

They are found by changing a field and rendering again: if the text stays the same, the template
does not read the field. Each kind of turn is tried once.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_finetune.data.rendering import KEY, MARK, VALUE, RenderingError, Template, Turn

REASONING = ("reasoning_content", "reasoning", "thinking")


class UnreadFields:
    """The fields that ``template`` does not read, cached for each kind of turn."""

    def __init__(self, template: Template):
        self._template = template
        self._unread: dict[Any, bool] = {}

    def of(self, turns: Sequence[Turn], extra: Mapping[str, Any]) -> Iterator[str]:
        """Yield names of fields that the template does not read and that carry no meaning.

        Raises:
            RenderingError: the template does not read a field that matters.
        """
        if extra.get("tools") and "tools" not in self._unread:
            if self._same(turns, extra, turns, {**extra, "tools": None}):
                raise RenderingError(
                    "'tools': the chat template does not read them; choose another with "
                    "data.chat_template, or ignore them with data.ignore: [tools]"
                )
            self._unread["tools"] = False
        for i, turn in enumerate(turns):
            previous_role = turns[i - 1]["role"] if i else ""
            for field, value in turn.items():
                if field == "role" or value in (None, "", [], {}):
                    continue
                thought = isinstance(value, str) and "</think>" in value
                by_id = field == "tool_calls" and all(map(_id_has_name, value))
                several = isinstance(value, list) and len(value) > 1  # some read only the first
                key = (field, i == 0, previous_role, thought, by_id, several, *kind_of(turn))
                if key not in self._unread:
                    self._unread[key] = self._is_unread(turns, i, field, extra)
                if self._unread[key]:
                    yield field

    def _is_unread(
        self, turns: Sequence[Turn], index: int, field: str, extra: Mapping[str, Any]
    ) -> bool:
        turn = turns[index]
        answered = [i for i in range(index, len(turns)) if turns[i]["role"] == "assistant"]
        conversation = turns[: answered[0] + 1] if answered else turns
        for altered in _changes(turn, field):
            if self._same(
                conversation,
                extra,
                [*conversation[:index], altered, *conversation[index + 1 :]],
                extra,
            ):
                named = field == "name" and turn["role"] == "tool"
                if named or field not in ("content", "tool_calls", "name", *REASONING):
                    return True
                if field == "content":
                    raise RenderingError(
                        f"turn {index}: 'content': the chat template omits all or part of it; "
                        "choose another with data.chat_template"
                    )
                if field == "tool_calls" and self._template.writes_ids:
                    raise RenderingError(
                        f"turn {index}: 'tool_calls': the chat template writes a call's id in "
                        "place of its name; give each call the id functions.NAME:INDEX, and its "
                        "result the same tool_call_id"
                    )
                read = "all of them" if field == "tool_calls" else "it"  # some read one call
                raise RenderingError(
                    f"turn {index}: '{field}': the chat template does not read {read}; "
                    f"{self._other_name(turns[: index + 1], field, extra)}, or ignore it with "
                    f"data.ignore: [{field}]"
                )
        return False

    def _other_name(self, turns: Sequence[Turn], field: str, extra: Mapping[str, Any]) -> str:
        """A remedy: the name under which the template would read the last turn's reasoning."""
        for name in REASONING:
            *earlier, last = turns
            renamed = {**last, name: last.get(field)}
            if (
                field in REASONING
                and name not in last
                and not self._same(turns, extra, [*earlier, renamed], extra)
            ):
                return f"rename it to '{name}', which this template reads"
        return "choose another with data.chat_template"

    def _same(
        self,
        turns: Sequence[Turn],
        extra: Mapping[str, Any],
        changed: Sequence[Turn],
        changed_extra: Mapping[str, Any],
    ) -> bool:
        prompt = turns[-1]["role"] != "assistant"
        try:
            text = self._template.render(turns, extra, prompt)
            return text == self._template.render(changed, changed_extra, prompt)
        except Exception:  # the template reads the field and refuses its value
            return False


def kind_of(turn: Turn) -> tuple[Any, ...]:
    """The role and the fields of a turn, on which a template's treatment depends."""
    fields = sorted(key for key, value in turn.items() if value not in (None, "", [], {}))
    return turn["role"], *fields


def _id_has_name(call: Mapping[str, Any]) -> bool:
    return f"functions.{call['function']['name']}:" in str(call.get("id"))


def _changes(turn: Turn, field: str) -> Iterator[Turn]:
    """``turn`` with a change in ``field``, once for each part that a template may not read."""
    value = turn[field]
    if field == "tool_calls":
        named, with_argument = copy.deepcopy(value), copy.deepcopy(value)
        # Kimi-K2 writes a call's id in place of its name; the last call whose id lacks it decides.
        call = next((call for call in reversed(named) if not _id_has_name(call)), named[-1])
        name = call["function"]["name"]
        if _id_has_name(call):
            call["id"] = call["id"].replace(name, f"{name}{MARK}")
        call["function"]["name"] += MARK
        yield {**turn, field: named}
        function = with_argument[-1]["function"]
        text = isinstance(function["arguments"], str)
        arguments = json.loads(function["arguments"]) if text else function["arguments"]
        arguments = {**arguments, KEY: VALUE}
        function["arguments"] = json.dumps(arguments) if text else arguments
        yield {**turn, field: with_argument}
        return
    yield changed(turn, field)
    if turn["role"] == "assistant" and isinstance(value, str) and "</think>" in value:
        yield {**turn, field: value.replace("</think>", f"{MARK}</think>", 1)}


def changed(turn: Turn, field: str) -> Turn:
    """``turn`` with text added to ``field``, or without ``field`` if it is not text."""
    value = turn.get(field)
    if isinstance(value, str):
        return {**turn, field: f"{value} {MARK}"}
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "text" in value[-1]:
        last = {**value[-1], "text": f"{value[-1]['text']} {MARK}"}
        return {**turn, field: [*value[:-1], last]}
    return {key: other for key, other in turn.items() if key != field}
