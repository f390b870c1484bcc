"""A conversation as its chat template writes it; a row of which it would omit a part is refused."""

import copy
import datetime
import functools
import itertools
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from transformers.utils.chat_template_utils import render_jinja_template

from moe_finetune.data.template_fields import compiled_template
from moe_finetune.data.thought_tags import CLOSING, OPENING
from moe_finetune.data.turns import REASONING
from moe_finetune.errors import DataError
from moe_finetune.models.tokenizer import Tokenizer

Turn = dict[str, Any]
Span = tuple[int, int]
SECONDS = 10.0
"""Processor time for one conversation; usual templates take a few milliseconds."""
_REMEDY = "choose another with data.chat_template"
_CLOSED = re.compile(CLOSING)
_THOUGHTS = re.compile(rf"\s*{OPENING}(.*?){CLOSING}\s*(.*)", re.DOTALL)
_EMPTY_BLOCK = re.compile(rf"{OPENING}\s*{CLOSING}\s*{OPENING}")


class RenderingError(DataError):
    """The template cannot render a conversation, or would omit a part of it."""


class TemplateLimitError(DataError):
    """A chat template takes too much time for one conversation."""


class OutOfTime(BaseException):
    """Not an Exception: handlers of the errors that templates raise must not catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit the processor time in which a template renders, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGPROF, stop)
    # Again later: an error raised inside a callback of the interpreter is lost. Not sooner: freeing
    # what a template made takes a second, and another error would escape from its handling.
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 5.0)
    try:
        yield
    except OutOfTime:
        raise TemplateLimitError(
            f"the chat template takes more than {SECONDS:.0f} seconds for this conversation; use "
            "the template of the base model, or name one with data.chat_template"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler or signal.SIG_DFL)


def midnight() -> datetime.datetime:
    """The time that chat templates write: two renderings of a conversation must agree."""
    return datetime.datetime.combine(datetime.date.today(), datetime.time())


@functools.lru_cache(maxsize=8)
def tagging_template(tokenizer: Tokenizer, template: str) -> str | None:
    """The template, or TRL's training variant of it, that marks the assistant's text.

    Not inside :func:`limited`: importing TRL takes seconds.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(template):
        return template
    try:
        with limited():
            return get_training_chat_template(cast(Any, tokenizer))
    except TemplateLimitError:
        raise
    except Exception:  # it renders the template, which may raise anything
        return None


@dataclass(frozen=True)
class Mark:
    """A text that stands in a field of a turn, and nowhere else."""

    turn: int
    field: str
    text: str


class Conversation:
    """A conversation in the form that the tokenizer's chat template accepts.

    A copy of it with a mark in each text tells which fields the template writes.

    Attributes:
        turns: with texts or lists of text parts as content, and a call's arguments as an object or
            JSON text.
        text: of all turns; with ``prompt`` it ends with the generation prompt.
    """

    def __init__(self, row: Mapping[str, Any], tokenizer: Tokenizer, prompt: bool = False):
        if not tokenizer.chat_template:
            raise DataError(
                "the data are chat messages, but the tokenizer has no chat template; choose one "
                "with data.chat_template (chatml, plain, or a Jinja file)"
            )
        tools = row.get("tools") or None
        try:
            self.template = tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise DataError(f"the tokenizer's chat templates cannot be read: {error}") from error
        self.tagging = tagging_template(tokenizer, self.template)
        tokens = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
        self.variables = {**tokens, **(row.get("variables") or {}), "tools": tools}
        self.prompt = prompt
        self.train = [turn.get("train", True) for turn in row["messages"]]
        turns = [_plain(turn) for turn in row["messages"]]
        with limited():
            self._choose(turns)
            if self._adds_a_think_block(turns):
                self._choose([_with_reasoning(turn) for turn in turns])
                if self._adds_a_think_block(turns):
                    raise RenderingError(
                        "the chat template writes an empty think block in front of the thoughts in "
                        f"a turn's content; move them to reasoning_content, or {_REMEDY}"
                    )

    def _adds_a_think_block(self, turns: Sequence[Turn]) -> bool:
        """Whether an empty think block precedes thoughts that a content has."""
        added = len(_EMPTY_BLOCK.findall(self.text))
        return added > sum(len(_EMPTY_BLOCK.findall(str(turn["content"]))) for turn in turns)

    def _choose(self, turns: list[Turn]) -> None:
        """Find the form of ``turns`` of which the template omits nothing."""
        marked, marks, tools = _marked(turns, self.variables["tools"])
        chosen = problem = None
        for form in itertools.product((False, True), (False, True), (True, False)):
            formed = [_formed(turn, *form) for turn in turns]
            try:
                text = self.render(formed, self.prompt)
            except RenderingError as error:
                problem = error
                continue
            lost = self._lost([_formed(turn, *form) for turn in marked], tools, marks)
            complete = not {mark.field for mark in lost} & {"content", "tool_calls"}
            complete = complete and not _has_python(formed, text)
            if complete or chosen is None:
                chosen = formed, text, lost
            if complete:
                break
        if chosen is None:
            assert problem is not None
            raise problem
        self.turns, self.text, lost = chosen
        for mark in lost:
            self._refuse(mark)

    def render(self, turns: Sequence[Turn], prompt: bool = False, **variables: Any) -> str:
        """Some turns; with ``prompt`` and the generation prompt."""
        if not turns and not prompt:
            return ""
        return self._jinja(turns, add_generation_prompt=prompt, **variables)[0][0]

    def tagged(self) -> list[Span]:
        """What the template, or TRL's variant of it that writes the same, marks as an answer."""
        if self.tagging is None:
            return []
        tags = {"chat_template": self.tagging, "return_assistant_tokens_mask": True}
        try:
            texts, spans = self._jinja(self.turns, **tags)
        except RenderingError:
            return []
        return spans[0] if texts[0] == self.text else []

    def _jinja(self, turns: Sequence[Turn], **options: Any) -> Any:
        variables = {"chat_template": self.template, **self.variables, **options}
        try:
            # Not a variable: from transformers 5.23 on, those are plain data.
            clock = compiled_template(variables["chat_template"]).globals
            clock["strftime_now"] = midnight().strftime
            try:
                return render_jinja_template([list(turns)], **variables)
            finally:
                del clock["strftime_now"]
        except Exception as error:  # templates may raise anything
            raise RenderingError(
                f"the chat template rejects these messages: {error}; {_REMEDY}"
            ) from error

    def _lost(
        self, turns: list[Turn], tools: list[Turn] | None, marks: Iterable[Mark]
    ) -> list[Mark]:
        """The marks in ``turns`` that the template does not write."""

        def missing(count: int, marks: Iterable[Mark]) -> list[Mark]:
            prompt = self.prompt and count == len(turns)
            try:
                text = self.render(turns[:count], prompt, tools=tools)
            except RenderingError:  # the template checks values: it reads them
                return []
            return [mark for mark in marks if mark.text not in text]

        lost = []
        for mark in missing(len(turns), marks):
            # Reasoning may be left out once the conversation goes on: what counts is the text in
            # which its answer comes last.
            later = range(mark.turn, len(turns))
            answered = (i + 1 for i in later if turns[i]["role"] == "assistant")
            lost += missing(next(answered, len(turns)), [mark])
        return lost

    def _refuse(self, mark: Mark) -> None:
        """Raise an error for a field that the template does not write."""
        where, remedy = f"turn {mark.turn}: '{mark.field}'", "or remove the field"
        if mark.field == "tools":
            if self.render(self.turns, self.prompt, tools=None) != self.text:
                return  # it writes other parts of them
            where, remedy = "'tools'", "or remove the column"
        elif mark.field == "tool_calls":
            remedy = (
                "or, if it writes a call's id in place of its name, give each call the id "
                "functions.NAME:INDEX, and its result the same tool_call_id"
            )
        elif mark.field in REASONING:
            others = " or ".join(name for name in REASONING if name != mark.field)
            remedy = f"rename the field to {others}, or remove it"
        raise RenderingError(
            f"{where}: the chat template omits all or part of it; {_REMEDY}, {remedy}"
        )


def _marked(
    turns: list[Turn], tools: list[Turn] | None
) -> tuple[list[Turn], list[Mark], list[Turn] | None]:
    """Copies of ``turns`` and ``tools`` with a mark in each text that a template has to write."""
    marks: list[Mark] = []
    turns, tools = copy.deepcopy(turns), copy.deepcopy(tools)

    def mark(turn: int, field: str) -> str:
        marks.append(Mark(turn, field, f"q{len(marks)}Zx"))
        return marks[-1].text

    if tools:
        schema = tools[0].get("function") or tools[0]
        schema["description"] = f"{schema.get('description') or ''} {mark(0, 'tools')}"
    for i, turn in enumerate(turns):
        for field in ("content", *REASONING) if turn["role"] == "assistant" else ("content",):
            if turn.get(field):
                text, tag = turn[field], _CLOSED.search(turn[field])
                if tag and field == "content":
                    text = text[: tag.start()] + mark(i, field) + text[tag.start() :]
                turn[field] = f"{text} {mark(i, field)}"
        for call in turn.get("tool_calls") or ():
            function = call["function"]
            name, added = function["name"] + mark(i, "tool_calls"), mark(i, "tool_calls")
            if "id" in call:  # a template that writes ids writes the name that is in them
                prefix = f"functions.{function['name']}:"
                call["id"] = str(call["id"]).replace(prefix, f"functions.{name}:")
            function.pop("arguments_text", None)
            function |= {"name": name, "arguments": {**function["arguments"], f"k{added}": added}}
    return turns, marks, tools


def _plain(turn: Turn) -> Turn:
    """``turn`` with a text as content and objects as arguments, which it may have as JSON text."""
    turn = {**turn, "content": _text(turn.get("content"))}
    turn.pop("train", None)
    if turn.get("tool_calls"):
        turn["tool_calls"] = [dict(call) for call in turn["tool_calls"]]
    for call in turn.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            both = {"arguments": json.loads(arguments), "arguments_text": arguments}
            call["function"] = {**call["function"], **both}
    return turn


def _formed(turn: Turn, parts: bool, text: bool, null: bool) -> Turn:
    """``turn`` with content as text or parts, arguments as an object or text, null or empty."""
    turn = dict(turn)
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_with_arguments(call, text) for call in turn["tool_calls"]]
        turn["content"] = turn["content"] if null else turn["content"] or ""
    if parts and turn["content"]:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
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


def _with_reasoning(turn: Turn) -> Turn:
    """``turn`` with the thoughts of its content in ``reasoning_content``."""
    thoughts = _THOUGHTS.match(turn["content"] or "") if turn["role"] == "assistant" else None
    if thoughts is None or any(turn.get(name) for name in REASONING):
        return turn
    return {**turn, "reasoning_content": thoughts[1].strip("\n"), "content": thoughts[2]}


def _text(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content
