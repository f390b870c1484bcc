"""A conversation through a chat template: its text, and the characters that are learned.

Runs in the process of :mod:`moe_finetune.data.template_process`, where each rendering has a limit.

What is learned of an answer: what the template writes beyond the prompt that a model is given, up
to its end-of-turn mark, as the text was when the answer was the last. Where a template marks its
assistant's text (``{% generation %}``), or TRL brings a copy of it that does and writes the same
text, only marked characters are learned. An answer that the template writes otherwise once the
conversation goes on is not learned.

What a template omits is found by changing a field and rendering again: if the text stays the same,
the template does not read the field. Each kind of turn is tried once.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

Turn = dict[str, Any]
Span = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = "q7Zx"
_NAME, _KEY, _VALUE = f"f{_MARK}", f"k{_MARK}", f"v{_MARK}"


class RenderingError(Exception):
    """A conversation that this template cannot render, or would render without a part of it."""


CHARACTERS = 64 << 20
"""The longest text of a conversation."""


class OutOfMemory(BaseException):
    """A rendering is too large; handlers of the errors that templates raise do not catch it."""


class Template:
    """A chat template with what was found out about it.

    Args:
        text: the template.
        marked: a copy of it that marks the assistant's text; None where there is none.
        variables: names of special tokens, as the tokenizer gives them to a template.
    """

    def __init__(self, text: str, marked: str | None, variables: Mapping[str, Any]):
        self.text, self.marked, self.variables = text, marked, dict(variables)
        self._seen: dict[Any, bool] = {}
        self._kinds: dict[str, str] = {}
        self._calls: tuple[bool, bool] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`learned` or :meth:`shown` returns for a request's turns."""
        turns, extra = request["turns"], request["extra"]
        if request["purpose"] == "learned":
            return self.learned(turns, extra)
        return self.shown(turns, extra, request["purpose"] == "prompt", request["checked"])

    def render(self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool = False) -> str:
        """The text of ``turns``; with ``prompt`` followed by what opens an answer."""
        return self._render(self.text, turns, extra, prompt, False)[0]

    def marks(self, turns: Sequence[Turn], extra: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Text and marked characters of the copy that marks; it has to exist."""
        return self._render(str(self.marked), turns, extra, False, True)

    def _render(
        self,
        template: str,
        turns: Sequence[Turn],
        extra: Mapping[str, Any],
        prompt: bool,
        marked: bool,
    ) -> tuple[str, list[Span]]:
        if not turns and not prompt:
            return "", []
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(turns)],
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **{"tools": None, **self.variables, **extra},
            )
        except MemoryError:
            raise OutOfMemory from None
        texts, marks = rendered
        if len(texts[0]) > CHARACTERS:
            raise OutOfMemory
        return texts[0], list(marks[0]) if marked else []

    def adapted(self, turns: Sequence[Turn]) -> list[Turn]:
        """``turns`` with contents and calls in the kind that the template takes."""
        return [self._adapted(turn) for turn in turns]

    def _adapted(self, turn: Turn) -> Turn:
        turn = {key: value for key, value in turn.items() if key != "train"}
        content = turn.get("content")
        if turn.get("tool_calls"):
            text, null = self._call_kind()
            turn["tool_calls"] = [_with_arguments(call, text) for call in turn["tool_calls"]]
            if content is None:
                turn["content"] = None if null else ""
        if isinstance(content, list):
            if self._content_kind(turn["role"]) != "both":
                content = "".join(part["text"] for part in content)
            turn["content"] = content
        if isinstance(content, str) and self._content_kind(turn["role"]) == "parts":
            turn["content"] = [{"type": "text", "text": content}]
        return turn

    def _content_kind(self, role: str) -> str:
        """What a turn's content may be: "text", "parts" (of text), or "both"."""
        if role not in self._kinds:
            text = self._tried(self._probe(role, _MARK), _MARK)
            parts = self._tried(self._probe(role, [{"type": "text", "text": _MARK}]), _MARK)
            same = parts is not None and parts == text
            self._kinds[role] = "both" if same else "parts" if parts and not text else "text"
        return self._kinds[role]

    def _probe(self, role: str, content: Any) -> list[Turn]:
        """A conversation that ends with a turn of ``role``."""
        turn, question = {"role": role, "content": content}, {"role": "user", "content": "x"}
        if role == "assistant":
            return [question, turn]
        if role != "tool":
            return [turn] if role == "user" else [turn, question]
        text, null = self._call_kind()
        called = {"role": "assistant", "content": None if null else "", "tool_calls": [_call(text)]}
        return [question, called, {**turn, "name": _NAME, "tool_call_id": "a1b2c3d4e"}]

    def _call_kind(self) -> tuple[bool, bool]:
        """Whether a call's arguments are JSON text, and whether its turn's content may be null."""
        if self._calls is None:
            for text, null in ((False, True), (False, False), (True, True), (True, False)):
                content = None if null else ""
                called = {"role": "assistant", "content": content, "tool_calls": [_call(text)]}
                turns: list[Turn] = [{"role": "user", "content": "x"}, called]
                rendered = self._tried(turns, _NAME, _KEY, _VALUE)
                if rendered and "None" not in rendered and f"{{'{_KEY}'" not in rendered:
                    self._calls = text, null
                    break
            else:
                raise RenderingError(
                    "'tool_calls': the chat template does not render them; name another with "
                    "data.chat_template, or leave them out with data.ignore: [tool_calls]"
                )
        return self._calls

    def _tried(self, turns: Sequence[Turn], *parts: str) -> str | None:
        """The text of ``turns`` where it has all ``parts``."""
        try:
            text = self.render(turns, {})
        except Exception:  # templates raise what they like
            return None
        return text if all(part in text for part in parts) else None

    def shown(
        self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool, checked: bool
    ) -> dict[str, Any]:
        """``text`` of the conversation, and its ``turns`` in the kind that the template takes.

        Raises:
            RenderingError: the template refuses the turns or, if ``checked``, omits a part of
                them.
        """
        turns = self.adapted(turns)
        text = self._refusing(turns, extra, prompt)
        if checked:
            list(self._unread(turns, extra))
        return {"text": text, "turns": turns}

    # -- what is learned ----------------------------------------------------------------------

    def learned(self, turns: Sequence[Turn], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Text of the conversation and what is learned of it.

        Returns:
            ``text``; ``spans``, the characters of each answer that is learned; ``others``, those of
            answers that are not to be learned; ``rewritten``, whether the template writes an
            earlier answer otherwise; ``unread``, fields that nothing reads.

        Raises:
            RenderingError: the template refuses the turns or omits a part of them.
        """
        train = [turn.get("train", True) for turn in turns]
        turns = self.adapted(turns)
        text = self._refusing(turns, extra)
        unread = sorted(set(self._unread(turns, extra)))
        marks = self._marks(turns, extra, text)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        spans: list[list[Span]] = []
        others: list[list[Span]] = []
        rewritten = False
        for i in answers:
            pieces = self._answer(turns, i, extra, text, marks)
            if train[i]:
                rewritten |= pieces is None
                spans.append(pieces or [])
                self._check_own(turns, i, extra, pieces)
            elif pieces is not None:
                others.append(pieces)
        if rewritten and train[answers[-1]] and not spans[-1]:
            raise RenderingError(
                "the chat template does not render the conversation before the last answer as the "
                "beginning of the whole; name another with data.chat_template, or set "
                "data.completion_only_loss=false"
            )
        flat = [list(span) for pieces in spans for span in pieces]
        unlearned_spans = [list(span) for pieces in others for span in pieces]
        return {
            "text": text,
            "spans": flat,
            "others": unlearned_spans,
            "rewritten": rewritten,
            "unread": unread,
        }

    def _refusing(
        self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool = False
    ) -> str:
        try:
            return self.render(turns, extra, prompt)
        except Exception as error:  # templates raise what they like, through jinja
            raise RenderingError(f"the chat template refuses these messages: {error}") from error

    def _marks(self, turns: Sequence[Turn], extra: Mapping[str, Any], text: str) -> list[Span]:
        if self.marked is None:
            return []
        try:
            rendered, marks = self.marks(turns, extra)
        except Exception:
            return []
        return marks if rendered == text else []

    def _answer(
        self,
        turns: Sequence[Turn],
        index: int,
        extra: Mapping[str, Any],
        text: str,
        marks: Sequence[Span],
    ) -> list[Span] | None:
        """Characters of answer ``index`` with its end mark; None where its text is not kept."""
        last = index == len(turns) - 1
        until = text if last else self.render(turns[: index + 1], extra)
        end = len(until.rstrip())
        if text[:end] != until[:end]:
            return None
        opened = self._refusing(turns[:index], extra, True)
        start = len(opened)
        if not until.startswith(opened):
            shared = os.path.commonprefix([opened, until])
            length_before = len(self.render(turns[:index], extra).rstrip())
            if len(shared) < length_before:
                return None
            # The prompt's `<think>` and the answer's `<tool_call>` share letters, not a tag.
            tag = shared.rfind("<", length_before)
            start = tag if tag > shared.rfind(">") else len(shared)
        if start >= end:
            return None
        inside = [(max(a, start), b) for a, b in marks if a < end and b > start]
        if not inside:
            return [(start, end)]
        # The end-of-turn mark is the assistant's, whether or not the template marks it.
        return [*inside[:-1], (inside[-1][0], end)]

    def _check_own(
        self,
        turns: Sequence[Turn],
        index: int,
        extra: Mapping[str, Any],
        pieces: Sequence[Span] | None,
    ) -> None:
        """Refuse a template that writes other turns' texts into an answer's characters."""
        previous_role = turns[index - 1]["role"] if index else ""
        key = ("own", previous_role, *_kind(turns[index]))
        if pieces is None or key in self._seen:
            return
        changed = [
            _changed(turn, "content") if turn["role"] != "assistant" else turn
            for turn in turns[: index + 1]
        ]
        try:
            now = self.render(turns[: index + 1], extra)
            other = self.render(changed, extra)
            marks = self._marks(changed, extra, other)
            moved = self._answer(changed, index, extra, other, marks)
        except Exception:  # it checks what the other turns say
            self._seen[key] = False
            return
        ours = [now[a:b] for a, b in pieces]
        if moved is not None and [other[a:b] for a, b in moved] != ours:
            raise RenderingError(
                "the chat template writes what others say into the assistant's answer, and it "
                "would be learned; name another with data.chat_template"
            )
        self._seen[key] = False

    # -- what is left out ---------------------------------------------------------------------

    def _unread(self, turns: Sequence[Turn], extra: Mapping[str, Any]) -> Iterator[str]:
        """Names of fields that the template does not read and that carry no meaning by themselves.

        Raises:
            RenderingError: it does not read one that matters.
        """
        if extra.get("tools") and "tools" not in self._seen:
            if self._same(turns, extra, turns, {**extra, "tools": None}):
                raise RenderingError(
                    "'tools': the chat template does not read them; name another with "
                    "data.chat_template, or leave them out with data.ignore: [tools]"
                )
            self._seen["tools"] = False
        for i, turn in enumerate(turns):
            previous_role = turns[i - 1]["role"] if i else ""
            for field, value in turn.items():
                if field == "role" or value in (None, "", [], {}):
                    continue
                thought = isinstance(value, str) and "</think>" in value
                key = (field, i == 0, previous_role, thought, *_kind(turn))
                if key not in self._seen:
                    self._seen[key] = self._is_unread(turns, i, field, extra)
                if self._seen[key]:
                    yield field

    def _is_unread(
        self, turns: Sequence[Turn], index: int, field: str, extra: Mapping[str, Any]
    ) -> bool:
        turn = turns[index]
        answered = [i for i in range(index, len(turns)) if turns[i]["role"] == "assistant"]
        conversation = turns[: answered[0] + 1] if answered else turns
        for changed in _changes(turn, field):
            if self._same(
                conversation,
                extra,
                [*conversation[:index], changed, *conversation[index + 1 :]],
                extra,
            ):
                named = field == "name" and turn["role"] == "tool"
                if named or field not in ("content", "tool_calls", "name", *REASONING):
                    return True
                if field == "content":
                    raise RenderingError(
                        f"turn {index}: 'content': the chat template leaves it out, or a part of "
                        "it; name another with data.chat_template"
                    )
                read = "all of them" if field == "tool_calls" else "it"  # some read one call
                raise RenderingError(
                    f"turn {index}: '{field}': the chat template does not read {read}; "
                    f"{self._other_name(turns[: index + 1], field, extra)}, or leave it out with "
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
                return f"rename it to '{name}', which this one reads"
        return "name another with data.chat_template"

    def _same(
        self,
        turns: Sequence[Turn],
        extra: Mapping[str, Any],
        changed: Sequence[Turn],
        changed_extra: Mapping[str, Any],
    ) -> bool:
        prompt = turns[-1]["role"] != "assistant"
        try:
            return self.render(turns, extra, prompt) == self.render(changed, changed_extra, prompt)
        except Exception:  # it reads the field, and does not like it
            return False


def _call(text: bool) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    return _with_arguments({"id": "a1b2c3d4e", "type": "function", "function": function}, text)


def _with_arguments(call: Mapping[str, Any], text: bool) -> dict[str, Any]:
    """``call`` with its arguments as JSON text, or as an object."""
    function = dict(call["function"])
    if text:
        # The row's own text, where it had one: models write it in other ways than we would.
        original = function.pop("arguments_text", None)
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            function["arguments"] = original or json.dumps(arguments, ensure_ascii=False)
    function.pop("arguments_text", None)
    return {**call, "function": function}


def _kind(turn: Turn) -> tuple[Any, ...]:
    fields = sorted(key for key, value in turn.items() if value not in (None, "", [], {}))
    return turn["role"], *fields


def _changes(turn: Turn, field: str) -> Iterator[Turn]:
    """``turn`` with something of ``field`` changed, in each way that a template may miss."""
    value = turn[field]
    if field == "tool_calls":
        named, with_argument = copy.deepcopy(value), copy.deepcopy(value)
        named[-1]["function"]["name"] += _MARK
        yield {**turn, field: named}
        function = with_argument[-1]["function"]
        text = isinstance(function["arguments"], str)
        arguments = json.loads(function["arguments"]) if text else function["arguments"]
        arguments = {**arguments, _KEY: _VALUE}
        function["arguments"] = json.dumps(arguments) if text else arguments
        yield {**turn, field: with_argument}
        return
    yield _changed(turn, field)
    if turn["role"] == "assistant" and isinstance(value, str) and "</think>" in value:
        yield {**turn, field: value.replace("</think>", f"{_MARK}</think>", 1)}


def _changed(turn: Turn, field: str) -> Turn:
    value = turn.get(field)
    if isinstance(value, str):
        return {**turn, field: f"{value} {_MARK}"}
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "text" in value[-1]:
        last = {**value[-1], "text": f"{value[-1]['text']} {_MARK}"}
        return {**turn, field: [*value[:-1], last]}
    return {key: other for key, other in turn.items() if key != field}
