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
import resource
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        usable: list[tuple[list[Turn], str, Probe]] = []
        problem = None
        for form in _forms(turns):
            try:
                text = self._render(form, prompt)
            except MemoryError:
                raise
            except Exception as error:  # templates may raise anything through jinja
                problem = error
                continue
            probe = self._probe(form)
            usable.append((form, text, probe))
            lost = {mark.field for mark in probe.lost}
            if not lost & {"content", "tool_calls"} and not _has_python(form, text):
                break
        else:
            del usable[1:]
        if not usable:
            raise RenderingError(f"the chat template rejects these messages: {problem}; {_REMEDY}")
        self.turns, self.text, self.probe = usable[-1]

    def _render(self, turns: Sequence[Turn], prompt: bool = False, **changes: Any) -> str:
        return self.template.render(turns, {**self.extra, **changes}, prompt)[0]

    def _probe(self, turns: Sequence[Turn]) -> "Probe":
        """Render ``turns`` with a mark in each of their texts, and note which are missing."""
        probe = Probe(turns, self.extra.get("tools"))

        def missing(count: int, marks: Iterable[Mark]) -> list[Mark]:
            context = probe.turns[:count]
            prompt = self.prompt if count == len(turns) else False
            try:
                text = self._render(context, prompt, tools=probe.tools)
            except Exception:  # the template checks values: it reads them
                return []
            return [mark for mark in marks if mark.text not in text]

        for mark in missing(len(turns), probe.marks):
            # Reasoning may be left out once the conversation goes on: what counts is the text in
            # which its answer comes last.
            answered = (
                i + 1 for i in range(mark.turn, len(turns)) if turns[i]["role"] == "assistant"
            )
            probe.lost += missing(next(answered, len(turns)), [mark])
        return probe

    def _generated(self, turns: Sequence[Turn], text: str) -> list[Span]:
        """Spans between the template's own generation tags; none if they change the text."""
        if self.template.marked is None:
            return []
        try:
            marked, spans = self.template.render(turns, self.extra, False, self.template.marked)
        except Exception:
            return []
        return spans if marked == text else []

    def answers(self) -> dict[int, Answer]:
        """The assistant's turns by index."""
        generated = self._generated(self.turns, self.text)
        return {
            i: self._answer(self.turns, i, self.text, generated)
            for i, turn in enumerate(self.turns)
            if turn["role"] == "assistant"
        }

    def _answer(
        self, turns: Sequence[Turn], index: int, text: str, generated: Sequence[Span]
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
        inside = [(max(a, start), b) for a, b in generated if a < end and b > start]
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
        for mark in self.probe.lost:
            self._refuse(mark)
        for i, answer in answers.items():
            if answer.pieces and not answer.rewritten and self.train[i] and self._mixed(i, answer):
                raise RenderingError(
                    "the chat template writes other turns' text into the assistant's answer, where "
                    f"it would be learned; {_REMEDY}"
                )
        unread = set()
        for turn in self.turns:
            known = {"role", "train", "tool_call_id", *_PARTS}
            known |= {"name"} if turn["role"] == "tool" else set()
            others = {k: v for k, v in turn.items() if k not in known and v not in (None, "", [])}
            unread |= {name for name, value in others.items() if str(value) not in self.text}
        return sorted(unread)

    def _refuse(self, mark: "Mark") -> None:
        """Raise an error for a field that the template does not write."""
        if mark.field == "tools":
            if self._render(self.turns, self.prompt, tools=None) != self.text:
                return  # it writes other parts of them
            raise RenderingError(
                f"'tools': the chat template does not read them; {_REMEDY}, or remove the column"
            )
        turn = self.turns[mark.turn]
        where = f"turn {mark.turn}: '{mark.field}': the chat template"
        if mark.field == "content":
            raise RenderingError(f"{where} omits all or part of it; {_REMEDY}")
        if mark.field != "tool_calls":
            raise RenderingError(f"{where} does not read it; {self._renaming(mark)}")
        ids = [str(call.get("id")) for call in turn["tool_calls"]]
        if any(name in self.text for name in ids if name != "None"):
            raise RenderingError(
                f"{where} writes a call's id in place of its name; give each call the id "
                "functions.NAME:INDEX, and its result the same tool_call_id"
            )
        raise RenderingError(f"{where} does not read all of them; {_REMEDY}")

    def _renaming(self, mark: "Mark") -> str:
        """A remedy: the name under which the template would read the turn's reasoning."""
        turn = self.turns[mark.turn]
        for name in (name for name in REASONING if name not in turn):
            renamed = [*self.turns[: mark.turn], {**turn, name: turn[mark.field]}]
            if self._render(renamed) != self._render(self.turns[: mark.turn + 1]):
                return f"rename it to '{name}', which this template reads"
        return f"{_REMEDY}, or remove the field"

    def _mixed(self, index: int, answer: Answer) -> bool:
        """Whether the template writes the text of other turns into an answer."""
        others = [i for i in range(index) if self.turns[i]["role"] != "assistant"]
        texts = [_text(self.turns[i]["content"]).strip() for i in others]
        if not any(text and text in answer.text for text in texts):
            return False
        turns = self.probe.turns[: index + 1]
        try:
            text = self._render(turns)
            learned = self._answer(turns, index, text, self._generated(turns, text)).text
        except Exception:  # the template checks the content of the other turns
            return False
        return any(mark.text in learned for mark in self.probe.marks if mark.turn in others)


@dataclass(frozen=True)
class Mark:
    """A text that occurs in no conversation, in a field of a turn."""

    turn: int
    field: str
    text: str


class Probe:
    """A copy of turns with a mark in each text that a template has to write.

    Attributes:
        marks: all marks; those of ``tools`` belong to the first turn.
        lost: those that the template does not write.
    """

    def __init__(self, turns: Sequence[Turn], tools: list[Any] | None):
        self.marks: list[Mark] = []
        self.lost: list[Mark] = []
        self.tools = tools and [self._tool(tools[0]), *tools[1:]]
        self.turns = [self._turn(index, turn) for index, turn in enumerate(turns)]

    def _mark(self, turn: int, field: str) -> str:
        self.marks.append(Mark(turn, field, f"q{len(self.marks)}Zx"))
        return self.marks[-1].text

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        schema = tool.get("function") or tool
        described = f"{schema.get('description') or ''} {self._mark(0, 'tools')}"
        marked = {**schema, "description": described}
        return {**tool, "function": marked} if "function" in tool else marked

    def _turn(self, index: int, turn: Turn) -> Turn:
        marked = dict(turn)
        for field in _PARTS if turn["role"] == "assistant" else ("content",):
            value = turn.get(field)
            if field == "tool_calls" and value:
                marked[field] = [self._call(index, call) for call in value]
            elif isinstance(value, list) and value:
                marked[field] = [{**value[0], "text": self._words(index, field, value[0]["text"])}]
            elif value:
                marked[field] = self._words(index, field, value)
        return marked

    def _words(self, turn: int, field: str, text: str) -> str:
        thought, tag, answer = text.partition("</think>")
        if tag and field == "content":
            text = f"{thought}{self._mark(turn, field)}{tag}{answer}"
        return f"{text} {self._mark(turn, field)}"

    def _call(self, turn: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        name, mark = function["name"], self._mark(turn, "tool_calls")
        arguments, added = function["arguments"], self._mark(turn, "tool_calls")
        text = isinstance(arguments, str)
        arguments = {**(json.loads(arguments) if text else arguments), f"k{added}": added}
        function |= {"name": name + mark, "arguments": json.dumps(arguments) if text else arguments}
        marked = {**call, "function": function}
        if "id" in call:  # a template that writes ids writes the name that is in them
            marked["id"] = str(call["id"]).replace(f"functions.{name}:", f"functions.{name}{mark}:")
        return marked


_PARTS = ("content", *REASONING, "tool_calls")
"""Fields of an answer that a template has to write."""


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
    content = content if content is None else _text(content)
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


def _has_python(turns: Sequence[Turn], text: str) -> bool:
    """Whether the template wrote a value of ``turns`` as Python does."""
    values = [turn["content"] for turn in turns]
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    values += [call["function"]["arguments"] or "" for call in calls]
    return any(str(value) in text for value in values if not isinstance(value, str))


def _text(content: Any) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
