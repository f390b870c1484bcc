"""A formed row as text and back, exactly, for the file between reading and preparing.

A table would give all objects one's fields. JSON is exact for texts, numbers of any size, lists and
objects; what else a Parquet file's columns have is written as an object with one key of ours, and
so is a row's own object with that key alone.
"""

import base64
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io.row_files import Row

_KEY = "moe_finetune.value"
_Write = Callable[[Any], Any]
_KINDS: dict[str, tuple[type, _Write, _Write]] = {
    # A datetime is a date, too, so it comes first.
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "decimal": (Decimal, str, Decimal),
}
"""Name in the text -> type, how it is written, and how it is read."""
_OBJECT = "object"


def row_text(location: str, row: Row, plain: bool = False) -> str:
    """``row`` as one line; DataError with ``location`` where a value has no exact text.

    Args:
        plain: refuse every value that a chat template cannot write as JSON, such as dates and NaN.
    """
    encoder = _PLAIN if plain else _ANY
    try:
        text = encoder.encode(row)
        if _KEY in text:
            text = encoder.encode(_escaped(row))
    except (TypeError, ValueError) as error:
        problem = "a value is neither text nor a number" if plain else "a value cannot be stored"
        raise DataError(f"{location}: {problem}: {error}") from error
    return text


def row_of_text(text: str) -> Row:
    """The row of which :func:`row_text` made ``text``."""
    row: Row = _DECODER.decode(text)
    return row


def _written(value: Any) -> dict[str, Any]:
    for name, (kind, write, _) in _KINDS.items():
        if isinstance(value, kind):
            return {_KEY: [name, write(value)]}
    raise TypeError(f"{type(value).__name__} is neither text, number, date, list nor object")


def _escaped(value: Any) -> Any:
    """``value`` with what reading would take for one of ours written as one of ours."""
    if isinstance(value, list | tuple):
        return [_escaped(part) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {name: _escaped(part) for name, part in value.items()}
    return {_KEY: [_OBJECT, parts[_KEY]]} if parts.keys() == {_KEY} else parts


def _read(decoded: dict[str, Any]) -> Any:
    if decoded.keys() != {_KEY}:
        return decoded
    name, text = decoded[_KEY]
    return {_KEY: text} if name == _OBJECT else _KINDS[name][2](text)


_PLAIN = json.JSONEncoder(allow_nan=False)
_ANY = json.JSONEncoder(default=_written)
_DECODER = json.JSONDecoder(object_hook=_read)
