"""Render conversations with a chat template, in the forms of content and calls it accepts."""

import itertools
import json
import math
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from moe_finetune.errors import DataError

Turn = dict[str, Any]
Span = tuple[int, int]
MARK = "q7Zx"
"""A text that occurs in no conversation."""
KEY, VALUE = f"k{MARK}", f"v{MARK}"
_NAME = f"f{MARK}"
_IDS = "a1b2c3d4e", f"functions.{_NAME}:0"
"""Ids of a test call: Mistral takes nine letters or digits; Kimi-K2 writes the id and no name."""


class RenderingError(DataError):
    """The template cannot render a conversation, or would omit a part of it."""


class TemplateLimitError(DataError):
    """A chat template exceeds the limits of time or memory for one conversation."""


SECONDS = 10.0
"""Processor time for one conversation; usual templates take a few milliseconds."""
BYTES = 2 << 30
"""Memory for one conversation."""
CHARACTERS = 64 << 20
"""The longest text of a conversation."""
_REMEDY = "use the template of the base model, or name one with data.chat_template"


# Handlers of the errors that templates raise must not catch these two.
class OutOfTime(BaseException):
    """A rendering takes too long."""


class OutOfMemory(BaseException):
    """A rendering is too large."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit time and memory while a template renders; outside the main thread only its text.

    The kernel ends the process (SIGXCPU) where the interpreter cannot interrupt the template.

    Raises:
        TemplateLimitError: a limit is exceeded.
    """
    main = threading.current_thread() is threading.main_thread()
    try:
        with _system_limits() if main else nullcontext():
            yield
    except OutOfTime:
        raise TemplateLimitError(
            f"the chat template takes more than {SECONDS:.0f} seconds for this conversation; "
            f"{_REMEDY}"
        ) from None
    except (MemoryError, OutOfMemory):
        raise TemplateLimitError(
            f"the chat template needs more than {BYTES >> 30} GiB of memory, or writes more than "
            f"{CHARACTERS >> 20} million characters; {_REMEDY}"
        ) from None


@contextmanager
def _system_limits() -> Iterator[None]:
    handler = signal.signal(signal.SIGPROF, _out_of_time)
    former = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}
    # Again each second: an error raised inside a callback of the interpreter is lost.
    timer = signal.setitimer(signal.ITIMER_PROF, SECONDS, 1.0)
    try:
        if (statm := Path("/proc/self/statm")).is_file():
            used = int(statm.read_text().split()[0]) * resource.getpagesize()
            _lower(resource.RLIMIT_AS, used + BYTES)
        _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + 3 * SECONDS))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, limits in former.items():
            resource.setrlimit(kind, limits)
        signal.signal(signal.SIGPROF, handler or signal.SIG_DFL)
        if handler is not None:  # one that Python did not set is gone
            signal.setitimer(signal.ITIMER_PROF, *timer)


def _lower(kind: int, limit: int) -> None:
    """Set the process's own limit where it is higher."""
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(kind, (limit, hard))


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime


class Template:
    """A chat template, and the forms of content and calls that it accepts.

    Args:
        text: the template.
        marked: a copy that marks the assistant's text; None if there is none.
        variables: the special tokens that the tokenizer passes to a template, by name.
    """

    def __init__(self, text: str, marked: str | None, variables: Mapping[str, Any]):
        self.text, self.marked, self.variables = text, marked, dict(variables)
        self._kinds: dict[str, str] = {}
        self._calls: tuple[bool, bool, str] | None = None

    def render(self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool = False) -> str:
        """The text of ``turns``; with ``prompt`` it ends with the generation prompt."""
        return self._render(self.text, turns, extra, prompt, False)[0]

    def marks(self, turns: Sequence[Turn], extra: Mapping[str, Any], text: str) -> list[Span]:
        """The marked characters of ``text``, the template's rendering of ``turns``.

        Empty if no copy of the template marks the assistant's text and writes the same text.
        """
        if self.marked is None:
            return []
        try:
            rendered, marks = self._render(self.marked, turns, extra, False, True)
        except Exception:
            return []
        return marks if rendered == text else []

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
        """``turns`` with contents and calls in the form that the template accepts."""
        return [self._adapted(turn) for turn in turns]

    def _adapted(self, turn: Turn) -> Turn:
        turn = {key: value for key, value in turn.items() if key != "train"}
        content = turn.get("content")
        if turn.get("tool_calls"):
            text, null, _ = self._call_kind()
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
            text = self._tried(self._probe(role, MARK), MARK)
            parts = self._tried(self._probe(role, [{"type": "text", "text": MARK}]), MARK)
            same = parts is not None and parts == text
            self._kinds[role] = "both" if same else "parts" if parts and not text else "text"
        return self._kinds[role]

    def _probe(self, role: str, content: Any) -> list[Turn]:
        """A test conversation that ends with a turn of ``role``."""
        turn, question = {"role": role, "content": content}, {"role": "user", "content": "x"}
        if role == "assistant":
            return [question, turn]
        if role != "tool":
            return [turn] if role == "user" else [turn, question]
        text, null, id_ = self._call_kind()
        content = None if null else ""
        called = {"role": "assistant", "content": content, "tool_calls": [_call(text, id_)]}
        return [question, called, {**turn, "name": _NAME, "tool_call_id": id_}]

    def _call_kind(self) -> tuple[bool, bool, str]:
        """Whether a call's arguments are JSON text, whether its turn's content may be null, and an
        id that the template accepts.
        """
        if self._calls is None:
            for id_, text, null in itertools.product(_IDS, (False, True), (True, False)):
                content = None if null else ""
                called = {"role": "assistant", "content": content, "tool_calls": [_call(text, id_)]}
                turns: list[Turn] = [{"role": "user", "content": "x"}, called]
                rendered = self._tried(turns, _NAME, KEY, VALUE)
                if rendered and "None" not in rendered and f"{{'{KEY}'" not in rendered:
                    self._calls = text, null, id_
                    break
            else:
                raise RenderingError(
                    "'tool_calls': the chat template does not render them; choose another with "
                    "data.chat_template, or ignore them with data.ignore: [tool_calls]"
                )
        return self._calls

    @property
    def writes_ids(self) -> bool:
        """Whether the template writes a call's id in place of its name, as Kimi-K2's does."""
        return self._call_kind()[2] == _IDS[1]

    def _tried(self, turns: Sequence[Turn], *parts: str) -> str | None:
        """The text of ``turns`` if it contains all ``parts``, else None."""
        try:
            text = self.render(turns, {})
        except Exception:  # templates may raise anything
            return None
        return text if all(part in text for part in parts) else None

    def checked_render(
        self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool = False
    ) -> str:
        """Like :meth:`render`.

        Raises:
            RenderingError: the template refuses the turns.
        """
        try:
            return self.render(turns, extra, prompt)
        except Exception as error:  # templates may raise anything through jinja
            raise RenderingError(f"the chat template rejects these messages: {error}") from error


def _call(text: bool, id_: str) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": {KEY: VALUE}}
    return _with_arguments({"id": id_, "type": "function", "function": function}, text)


def _with_arguments(call: Mapping[str, Any], text: bool) -> dict[str, Any]:
    """``call`` with its arguments as JSON text, or as an object."""
    function = dict(call["function"])
    if text:
        # The row's text if it has one: models format JSON differently than we would.
        original = function.pop("arguments_text", None)
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            function["arguments"] = original or json.dumps(arguments, ensure_ascii=False)
    function.pop("arguments_text", None)
    return {**call, "function": function}
