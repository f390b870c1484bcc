"""A mapping type for everything that is looked up by name."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from moe_finetune.errors import MoeFinetuneError, PluginError, did_you_mean

Value = TypeVar("Value")


class Registry(Mapping[str, Value]):
    """Values by name: the package's own, and those of installed packages.

    Args:
        kind: the kind of values, for messages ("family", "loss term").
        error: the exception class raised for an unknown name.
        group: entry-point group with more values. Each is imported when its name is looked up.
        problem: returns what is wrong with an entry point's name and value, or None.
    """

    def __init__(
        self,
        kind: str,
        error: type[MoeFinetuneError],
        group: str | None = None,
        problem: Callable[[str, object], str | None] = lambda name, value: None,
    ):
        self.kind = kind
        self.group = group
        self._error = error
        self._problem = problem
        self._values: dict[str, Value] = {}

    def register(self, name: str, value: Value) -> Value:
        if name in self._values:
            raise ValueError(f"{self.kind} '{name}' is already registered")
        self._values[name] = value
        return value

    def __getitem__(self, name: str) -> Value:
        if name in self._plugins:
            return self._load(self._plugins[name])
        if name not in self._values:
            raise self._error(f"unknown {self.kind} '{name}'{did_you_mean(name, self)}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._plugins

    def __len__(self) -> int:
        return len(self._values) + len(self._plugins)

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        plugins: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group) if self.group else ():
            if point.name in self._values or point.name in plugins:
                raise PluginError(
                    f"{self.kind} '{point.name}' of the installed {point.value} already exists; "
                    "rename that entry point or uninstall its package"
                )
            plugins[point.name] = point
        return plugins

    def _load(self, point: EntryPoint) -> Value:
        try:
            value = point.load()
        except Exception as error:  # whatever the package's own code raises
            raise PluginError(
                f"{self.kind} '{point.name}' ({point.value}, an entry point of {self.group}) "
                f"cannot be loaded: {type(error).__name__}: {error}; fix or uninstall its package"
            ) from error
        problem = self._problem(point.name, value)
        if problem is not None:
            raise PluginError(f"{self.kind} '{point.name}' ({point.value}): {problem}")
        return value
