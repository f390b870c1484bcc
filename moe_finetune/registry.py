"""A mapping type for everything that is looked up by name."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from moe_finetune.errors import MoeFinetuneError, did_you_mean

Value = TypeVar("Value")
OLD_GROUPS = ("moe_finetune.families", "moe_finetune.losses", "moe_finetune.rewards")


class Registry(Mapping[str, Value]):
    """Values by name: the package's own, and those that plugins register.

    Args:
        kind: the kind of values, for messages ("family", "loss term").
        error: the exception class raised for an unknown name.
        problem: returns what is wrong with a name and its value, or None.
    """

    def __init__(
        self,
        kind: str,
        error: type[MoeFinetuneError],
        problem: Callable[[str, object], str | None] = lambda name, value: None,
    ):
        self.kind = kind
        self._error = error
        self._problem = problem
        self._values: dict[str, Value] = {}

    def register(self, name: str, value: Value) -> Value:
        if name in self._values:
            raise ValueError(f"{self.kind} '{name}' is already registered")
        if (problem := self._problem(name, value)) is not None:
            raise ValueError(f"{self.kind} '{name}' {problem}")
        self._values[name] = value
        return value

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            hint = old_declaration(name) or did_you_mean(name, self)
            raise self._error(f"unknown {self.kind} '{name}'{hint}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def old_declaration(name: str | None = None) -> str:
    """What to do with an installed package's entry point that is not read; empty without one.

    Args:
        name: of the entry point; None for any family.
    """
    groups = OLD_GROUPS[:1] if name is None else OLD_GROUPS[1:]
    for point in (point for group in groups for point in entry_points(group=group)):
        if name in (None, point.name):
            return (
                f"; the entry point {point.group} of {point.value} is not read: let that package "
                "declare a module that registers it under moe_finetune.plugins, and name it with "
                "`plugins:` or --plugin"
            )
    return ""
