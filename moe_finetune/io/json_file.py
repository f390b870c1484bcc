"""The package's JSON reader: refuses duplicate keys and numbers that are not finite, by line.

Python's reader accepts duplicate keys (the last wins), ``NaN`` and ``1e999`` (infinity).
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError

MAX_BYTES = 64 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class TextError(ValueError):
    """Text that cannot be read, at ``line``; None when no single line is at fault."""

    def __init__(self, problem: str, line: int | None = None):
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem, self.line = problem, line


class JsonError(TextError):
    """Text that is not strict JSON."""


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """The value that ``text`` encodes; ``finite`` refuses NaN and infinity, which logs may have."""
    with _strict():
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = _decoder(finite).decode(text)
    _refuse_half_characters(text, value)
    return value


def parse_items(text: str, finite: bool = True) -> Iterator[Any]:
    """The items of the list that ``text`` encodes, each decoded when it is reached.

    What is wrong is raised after the items before it.
    """
    decoder, position = _decoder(finite), _past_space(text, 0)
    if not text.startswith("[", position):
        raise _at(text, position, "Expecting a list")
    position = _past_space(text, position + 1)
    more = not text.startswith("]", position)
    while more:
        with _strict():
            value, end = decoder.raw_decode(text, position)
        _refuse_half_characters(text[position:end], value)
        yield value
        position = _past_space(text, end)
        if more := text.startswith(",", position):
            position = _past_space(text, position + 1)
    if not text.startswith("]", position):
        raise _at(text, position, "Expecting ',' delimiter")
    if (position := _past_space(text, position + 1)) < len(text):
        raise _at(text, position, "Extra data")


def read_json(file: Path, refused: type[MoeFinetuneError], remedy: str, finite: bool = True) -> Any:
    """The value in ``file``, see :func:`parse_json`."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise refused(f"{file}: has more than {MAX_BYTES >> 20} MiB; {remedy}")
        return parse_json(raw, finite)
    except OSError as problem:
        raise refused(f"{file}: cannot be read ({problem.strerror}); {remedy}") from None
    except JsonError as problem:
        location = file if problem.line is None else f"{file}:{problem.line}"
        raise refused(f"{location}: {problem.problem}; {remedy}") from None


def read_object(
    file: Path, refused: type[MoeFinetuneError], remedy: str, finite: bool = True
) -> dict[str, Any]:
    """The object in ``file``."""
    value = read_json(file, refused, remedy, finite)
    if not isinstance(value, dict):
        raise refused(f"{file}: contains {type(value).__name__} instead of an object; {remedy}")
    return value


@functools.cache
def _decoder(finite: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_float=_finite if finite else float,
        parse_constant=_constant if finite else float,
    )


@contextmanager
def _strict() -> Iterator[None]:
    """Raise JsonError for what Python's reader raises."""
    try:
        yield
    except json.JSONDecodeError as problem:
        raise JsonError(f"not JSON ({problem.msg})", problem.lineno) from None
    except UnicodeDecodeError as problem:
        raise JsonError(f"not UTF-8 at byte {problem.start}") from None
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except JsonError:
        raise
    except ValueError as problem:  # an integer of thousands of digits
        raise JsonError(f"not JSON ({problem})") from None


def _at(text: str, position: int, problem: str) -> JsonError:
    return JsonError(f"not JSON ({problem})", text.count("\n", 0, position) + 1)


def _past_space(text: str, position: int) -> int:
    end: int = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    return end


def _refuse_half_characters(text: str, value: Any) -> None:
    """Refuse half of a surrogate pair: scraped texts have them, and tokenizers fail on them."""
    if not _SURROGATE.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise JsonError(
            "contains half of a surrogate pair, which is not a valid character"
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the key '{twice:.80}' occurs twice in one object")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonError(f"{digits:.40} is not a finite number")
    return value


def _constant(name: str) -> float:
    raise JsonError(f"{name} is not a finite number")
