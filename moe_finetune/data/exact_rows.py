"""A formed row as text and back, exactly, for the file between reading and preparing.

A table would give all objects one's fields. JSON is exact for texts, numbers of any size, lists and
objects; what else a Parquet file's columns have is written as an object with one key of ours.
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


def row_text(location: str, row: Row) -> str:
    """``row`` as one line; DataError with ``location`` where a value has no exact text."""
    try:
        return json.dumps(row, default=_written)
    except (TypeError, ValueError) as error:
        raise DataError(f"{location}: a value cannot be stored: {error}") from error


def row_of_text(text: str) -> Row:
    """The row of which :func:`row_text` made ``text``."""
    row: Row = json.loads(text, object_hook=_read)
    return row


def _written(value: Any) -> dict[str, Any]:
    for name, (kind, write, _) in _KINDS.items():
        if isinstance(value, kind):
            return {_KEY: [name, write(value)]}
    raise TypeError(f"{type(value).__name__} is neither text, number, date, list nor object")


def _read(decoded: dict[str, Any]) -> Any:
    if decoded.keys() != {_KEY}:
        return decoded
    name, text = decoded[_KEY]
    return _KINDS[name][2](text)
