"""The types of a table's columns whose rows come one by one."""

import json
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from typing import Any

from moe_finetune.io.row_files import Row

_MOST_KINDS = 1000
_EXACT = 2**53
_INT64 = 2**63


class ColumnTypes:
    """The columns of the rows added so far, with types as Arrow infers them of all their values.

    One value of each kind is kept, on which alone the type depends. A column that no type fits, or
    that has too many kinds, such as objects with a row's own names as keys, is JSON.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[Hashable, Any]] = {}

    def add(self, row: Row) -> None:
        """Note the kinds of a row's values."""
        for name, value in row.items():
            kinds = self._values.setdefault(name, {})
            if len(kinds) < _MOST_KINDS:
                kinds.setdefault(_kind(value), value)

    def features(self, turns: Collection[str] = ()) -> dict[str, Any]:
        """Column -> type; of ``turns`` those with lists or objects are JSON, as they are."""
        from datasets import Dataset, Json

        types: dict[str, Any] = {}
        for name, kinds in self._values.items():
            values, types[name] = list(kinds.values()), Json()
            structured = any(isinstance(value, list | dict) for value in values)
            if len(kinds) == _MOST_KINDS or (name in turns and structured):
                continue
            with suppress(TypeError, ValueError, OverflowError):  # pyarrow's; JSON has any value
                types |= Dataset.from_dict({name: values}).features
        return types


def as_json(value: Any) -> str:
    """A value of a JSON column, which would read the text "7" as the number."""
    from datasets import Json

    text: str = json.dumps(value) if isinstance(value, str) else Json().encode_example(value)
    return text


def _kind(value: Any) -> Hashable:
    """Equal for values that have the same part in an inferred type."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, int):  # float64 has no exact larger ones, and int64 no more
        return int, abs(value) <= _EXACT, -_INT64 <= value < _INT64
    if isinstance(value, list):
        return list, frozenset(map(_kind, value))
    if isinstance(value, Mapping):
        return dict, frozenset((name, _kind(part)) for name, part in value.items())
    return type(value), getattr(value, "tzinfo", None)
