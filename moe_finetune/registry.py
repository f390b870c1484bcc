"""One small mapping type for everything that is looked up by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from moe_finetune.errors import MoeFinetuneError, did_you_mean

Value = TypeVar("Value")


class Registry(Mapping[str, Value]):
    """Names to values; a second registration of a name is refused, an unknown name gets a hint.

    Args:
        kind: what the values are, for messages ("family", "loss term").
        error: the exception class raised for an unknown name.
    """

    def __init__(self, kind: str, error: type[MoeFinetuneError]):
        self.kind = kind
        self._error = error
        self._values: dict[str, Value] = {}

    def register(self, name: str, value: Value) -> Value:
        if name in self._values:
            raise ValueError(f"{self.kind} '{name}' is registered already")
        self._values[name] = value
        return value

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            raise self._error(f"unknown {self.kind} '{name}'{did_you_mean(name, self._values)}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
