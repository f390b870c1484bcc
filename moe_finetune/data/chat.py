"""A conversation as its chat template writes it, and the characters of it that are learned.

The learned part of an answer is what the template writes after the generation prompt, up to the
end-of-turn mark, in the text in which the answer comes last. If a template marks the assistant's
text (``{% generation %}``), or TRL has a marked copy that writes the same text, only marked
characters are learned. An answer that the template renders differently once the conversation goes
on is not learned. A row of which the template would omit a part is refused.
"""

import itertools
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from moe_finetune.errors import DataError

Turn = dict[str, Any]
Span = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")
SECONDS = 10.0
"""Processor time for one conversation; usual templates take a few milliseconds."""
AGAIN = 5.0
"""Seconds until the time limit is raised again, where its first error was lost."""
BYTES = 2 << 30
"""Memory for one conversation."""
_REMEDY = "choose another with data.chat_template"


class RenderingError(DataError):
    """The template cannot render a conversation, or would omit a part of it."""


class TemplateLimitError(DataError):
    """A chat template takes too much time or memory for one conversation."""


class OutOfTime(BaseException):
    """Not an Exception: handlers of the errors that templates raise must not catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time and memory in which a template renders, in the main thread.

    Raises:
        TemplateLimitError: it takes more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if soft == resource.RLIM_INFINITY or soft > used + BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, hard))
    handler = signal.signal(signal.SIGPROF, stop)
    # Again later: an error raised inside a callback of the interpreter is lost. Not sooner: freeing
    # what a template made takes a second, and another error would escape from its handling.
    signal.setitimer(signal.ITIMER_PROF, SECONDS, AGAIN)
    try:
        try:
            yield
        finally:  # the next time may come in here, so the error is caught outside
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (OutOfTime, MemoryError) as error:
        more = f"{SECONDS:.0f} seconds" if isinstance(error, OutOfTime) else f"{BYTES >> 30} GiB"
        raise TemplateLimitError(
            f"the chat template takes more than {more} for this conversation; use the template of "
            "the base model, or name one with data.chat_template"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler or signal.SIG_DFL)


@dataclass(frozen=True)
class Template:
    """A chat template.

    Attributes:
        text: the template.
        marked: a copy that marks the assistant's text; None if there is none.
        variables: the special tokens that the tokenizer passes to a template, and the clock.
    """

    text: str
    marked: str | None
    variables: Mapping[str, Any]

    def render(
        self,
        turns: Sequence[Turn],
        extra: Mapping[str, Any],
        prompt: bool = False,
        template: str | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of ``turns``, with ``prompt`` up to the next answer; and the marked parts."""
        if not turns and not prompt:
            return "", []
        rendered: Any = render_jinja_template(
            conversations=[list(turns)],
            chat_template=template or self.text,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=template is not None,
            **{"tools": None, **self.variables, **extra},
        )
        return rendered[0][0], list(rendered[1][0]) if template is not None else []


@dataclass(frozen=True)
class Answer:
    """An assistant's turn: where its text is in ``until``, the text in which it comes last."""

    until: str
    pieces: list[Span]
    rewritten: bool

    @property
    def text(self) -> str:
        return "\n".join(self.until[a:b] for a, b in self.pieces)


class Conversation:
    """A conversation in the form that the template accepts.

    Attributes:
        turns: with texts or lists of text parts as content, and a call's arguments as an object or
            JSON text.
        text: of all turns; with ``prompt`` it ends with the generation prompt.

    Raises:
        RenderingError: the template refuses the turns.
    """

    def __init__(
        self,
        template: Template,
        turns: Sequence[Turn],
        extra: Mapping[str, Any],
        prompt: bool = False,
    ):
        self.template, self.extra, self.prompt = template, extra, prompt
        self.train = [turn.get("train", True) for turn in turns]
        problem, usable = None, []
        for form in _forms(turns):
            try:
                text = self._render(form, prompt)
            except MemoryError:
                raise
            except Exception as error:  # templates may raise anything through jinja
                problem = error
                continue
            usable.append((form, text))
            if _is_whole(form, text):
                break
        if not usable:
            raise RenderingError(f"the chat template rejects these messages: {problem}; {_REMEDY}")
        whole = _is_whole(*usable[-1])
        self.turns, self.text = usable[-1] if whole else usable[0]

    def _render(self, turns: Sequence[Turn], prompt: bool = False) -> str:
        return self.template.render(turns, self.extra, prompt)[0]

    def _marks(self, turns: Sequence[Turn], text: str) -> list[Span]:
        if self.template.marked is None:
            return []
        try:
            marked, marks = self.template.render(turns, self.extra, False, self.template.marked)
        except Exception:
            return []
        return marks if marked == text else []

    def answers(self) -> dict[int, Answer]:
        """The assistant's turns by index."""
        marks = self._marks(self.turns, self.text)
        return {
            i: self._answer(self.turns, i, self.text, marks)
            for i, turn in enumerate(self.turns)
            if turn["role"] == "assistant"
        }

    def _answer(
        self, turns: Sequence[Turn], index: int, text: str, marks: Sequence[Span]
    ) -> Answer:
        """Answer ``index`` with its end mark; without pieces where its text is not known."""
        last = index == len(turns) - 1
        until = text if last else self._render(turns[: index + 1])
        end = len(until.rstrip())
        rewritten = text[:end] != until[:end]
        opened = self._render(turns[:index], True)
        start = len(opened)
        if not until.startswith(opened):
            shared = os.path.commonprefix([opened, until])
            length_before = len(self._render(turns[:index]).rstrip())
            if len(shared) < length_before:
                return Answer(until, [], True)
            # The prompt's `<think>` and the answer's `<tool_call>` share letters, not a tag.
            tag = shared.rfind("<", length_before)
            start = tag if tag > shared.rfind(">") else len(shared)
        if start >= end:
            return Answer(until, [], True)
        inside = [(max(a, start), b) for a, b in marks if a < end and b > start]
        if rewritten or not inside:
            return Answer(until, [(start, end)], rewritten)
        # The end-of-turn mark belongs to the assistant, whether or not the template marks it.
        return Answer(until, [*inside[:-1], (inside[-1][0], end)], False)

    def check(self, answers: Mapping[int, Answer]) -> list[str]:
        """Refuse what the template omits; return other fields whose text it does not write.

        Raises:
            RenderingError: the template omits a part that matters, or writes another turn's text
                into an answer.
        """
        if self.extra.get("tools") and not self._shows_tools():
            untold = self.template.render(self.turns, {**self.extra, "tools": None}, self.prompt)
            if untold[0] == self.text:
                raise RenderingError(
                    f"'tools': the chat template does not read them; {_REMEDY}, or remove the "
                    "column"
                )
        position, unread = 0, set()
        for i, turn in enumerate(self.turns):
            answer = answers.get(i)
            if answer is not None:
                region = answer.text if answer.pieces else answer.until
                rest = _without(region, [p for f in _PARTS for p in _pieces(turn, f)])
                for field in _PARTS:
                    if _without(region, _pieces(turn, field)) is None or rest is None:
                        self._check_read(i, field)
                if answer.pieces and not answer.rewritten and self.train[i]:
                    position = answer.pieces[-1][1]
                    self._check_own(i, region if rest is None else rest, answer)
            for piece in () if answer is not None else _pieces(turn, "content"):
                # Between the answers around it: a result's text may occur in the next answer.
                later = [a.pieces[0][0] for j, a in answers.items() if j > i and not a.rewritten]
                end = min(later, default=len(self.text))
                places = ((self.text.find(form, position, end), form) for form in _written(piece))
                start, form = next((place for place in places if place[0] >= 0), (-1, ""))
                if start < 0:
                    self._check_read(i, "content")
                position = max(position, start + len(form))
            known = ("role", "train", *_PARTS, *(["name"] if turn["role"] == "tool" else []))
            others = {k: v for k, v in turn.items() if k not in known and v not in (None, "", [])}
            unread |= {name for name, value in others.items() if str(value) not in self.text}
        return sorted(unread - {"tool_call_id"})

    def _shows_tools(self) -> bool:
        """Whether the text has a tool's description, which neither turns nor templates have."""
        turns = json.dumps(self.turns, ensure_ascii=False)
        for tool in self.extra["tools"]:
            text = str((tool.get("function") or tool).get("description") or "").strip()
            if len(text) >= 16 and text in self.text:
                return not any(form in turns for form in _written(text))
        return False

    def _check_read(self, index: int, field: str) -> None:
        """Refuse a field that can change without changing the text; the exact, slower check."""
        turn = self.turns[index]
        answered = [
            i for i in range(index, len(self.turns)) if self.turns[i]["role"] == "assistant"
        ]
        context = self.turns[: answered[0] + 1] if answered else self.turns
        for altered in _changes(turn, field):
            if not self._same(context, index, altered):
                continue
            where = f"turn {index}: '{field}': the chat template"
            if field == "content":
                raise RenderingError(f"{where} omits all or part of it; {_REMEDY}")
            if field != "tool_calls":
                raise RenderingError(f"{where} does not read it; {self._renaming(index, field)}")
            ids = [str(call.get("id")) for call in turn["tool_calls"]]
            if any(name in self.text for name in ids if name != "None"):
                raise RenderingError(
                    f"{where} writes a call's id in place of its name; give each call the id "
                    "functions.NAME:INDEX, and its result the same tool_call_id"
                )
            raise RenderingError(f"{where} does not read all of them; {_REMEDY}")

    def _check_own(self, index: int, rest: str, answer: Answer) -> None:
        """Refuse a template that writes the text of other turns into an answer."""
        others = [turn for turn in self.turns[:index] if turn["role"] != "assistant"]
        if not any(piece in rest for turn in others for piece in _pieces(turn, "content")):
            return
        altered = [
            next(_changes(turn, "content"), turn) if turn["role"] != "assistant" else turn
            for turn in self.turns[: index + 1]
        ]
        try:
            text = self._render(altered)
            moved = self._answer(altered, index, text, self._marks(altered, text))
        except Exception:  # the template checks the content of the other turns
            return
        if moved.text != answer.text:
            raise RenderingError(
                "the chat template writes other turns' text into the assistant's answer, where "
                f"it would be learned; {_REMEDY}"
            )

    def _renaming(self, index: int, field: str) -> str:
        """A remedy: the name under which the template would read the turn's reasoning."""
        turn = self.turns[index]
        for name in (name for name in REASONING if name not in turn):
            if not self._same(self.turns[: index + 1], index, {**turn, name: turn[field]}):
                return f"rename it to '{name}', which this template reads"
        return f"{_REMEDY}, or remove the field"

    def _same(self, turns: Sequence[Turn], index: int, altered: Turn) -> bool:
        prompt = turns[-1]["role"] != "assistant"
        changed = [*turns[:index], altered, *turns[index + 1 :]]
        try:
            return self._render(turns, prompt) == self._render(changed, prompt)
        except Exception:  # the template reads the field and refuses its value
            return False


_PARTS = ("content", *REASONING, "tool_calls")
"""Fields of an answer that a template has to write."""
_MARK = "q7Zx"
"""A text that occurs in no conversation."""


def _forms(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """``turns`` in each form that templates take: transformers' own first."""
    called = any(turn.get("tool_calls") for turn in turns)
    for parts, text, null in itertools.product((False, True), (False, True), (True, False)):
        if called or not (text or null):
            yield [_formed(turn, parts, text, null) for turn in turns]


def _formed(turn: Turn, parts: bool, text: bool, null: bool) -> Turn:
    """``turn`` with content as text or parts, arguments as an object or text, null or empty."""
    turn = {key: value for key, value in turn.items() if key != "train"}
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_with_arguments(call, text) for call in turn["tool_calls"]]
        content = content if null else content or ""
    turn["content"] = [{"type": "text", "text": content}] if parts and content else content
    return turn


def _with_arguments(call: Mapping[str, Any], text: bool) -> dict[str, Any]:
    """``call`` with its arguments as JSON text, or as an object."""
    function = dict(call["function"])
    # The row's text if it has one: models format JSON differently than we would.
    written = function.pop("arguments_text", None)
    if text:
        written = written or json.dumps(function["arguments"], ensure_ascii=False)
        function["arguments"] = written
    return {**call, "function": function}


def _is_whole(turns: Sequence[Turn], text: str) -> bool:
    """Whether ``text`` has the contents and calls of ``turns``, and nothing as Python writes it."""
    if "None" in text and any(turn["content"] is None for turn in turns):
        return False
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if arguments and isinstance(arguments, dict) and str(arguments) in text:
                return False
        if isinstance(turn["content"], list) and str(turn["content"]) in text:
            return False
    # What comes before the last question may be left out, such as earlier reasoning.
    pieces = [
        piece for turn in turns for f in ("content", "tool_calls") for piece in _pieces(turn, f)
    ]
    return all(any(form in text for form in _written(piece)) for piece in pieces)


def _pieces(turn: Turn, field: str) -> list[str]:
    """The texts of a field, each of which a template writes as it is."""
    value = turn.get(field)
    if field == "tool_calls":
        return [piece for call in value or () for piece in _of_call(call["function"])]
    if isinstance(value, list):
        value = "".join(part["text"] for part in value)
    texts = re.split("</?think>", value) if isinstance(value, str) else []
    return [text.strip() for text in texts if text.strip()]


def _of_call(function: Mapping[str, Any]) -> list[str]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return [function["name"], *arguments, *(v for v in map(_leaf, arguments.values()) if v)]


def _leaf(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _written(piece: str) -> Iterator[str]:
    """How a template may write ``piece``: as it is, or in JSON."""
    yield piece
    yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield json.dumps(piece)[1:-1]


def _without(text: str, pieces: Sequence[str]) -> str | None:
    """``text`` without one occurrence of each piece; None if one does not occur."""
    for piece in sorted(pieces, key=len, reverse=True):
        form = next((form for form in _written(piece) if form in text), None)
        if form is None:
            return None
        text = text.replace(form, "\0", 1)
    return text


def _changes(turn: Turn, field: str) -> Iterator[Turn]:
    """``turn`` with a change in ``field``, once for each part that a template may not read."""
    value = turn.get(field)
    if field == "tool_calls":
        for i, call in enumerate(value or ()):
            function = call["function"]
            text = isinstance(function["arguments"], str)
            arguments = json.loads(function["arguments"]) if text else function["arguments"]
            arguments = {**arguments, f"k{_MARK}": _MARK}
            more = {"arguments": json.dumps(arguments) if text else arguments}
            # A template that writes ids writes the name that is in them.
            name, other = function["name"], f"{function['name']}{_MARK}"
            id_ = str(call.get("id", "")).replace(f"functions.{name}:", f"functions.{other}:")
            renamed = {**call, "function": {**function, "name": other}}
            renamed |= {"id": id_} if "id" in call else {}
            for changed in (renamed, {**call, "function": {**function, **more}}):
                yield {**turn, field: [*value[:i], changed, *value[i + 1 :]]}  # type: ignore[index]
    elif isinstance(value, str) and value:
        yield {**turn, field: f"{value} {_MARK}"}
        if turn["role"] == "assistant" and "</think>" in value:
            yield {**turn, field: value.replace("</think>", f"{_MARK}</think>", 1)}
    elif isinstance(value, list) and value:
        yield {**turn, field: [{**value[-1], "text": f"{value[-1]['text']} {_MARK}"}]}
