"""The package's YAML reader: data only, and no duplicate keys."""

import re
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.json_file import TextError

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
"""Values in a document once its aliases are expanded."""


class YamlError(TextError):
    """Text that is not YAML, or uses YAML that is not supported here."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with numbers as in YAML 1.2: ``1e-3`` is one, and ``1:30`` is text."""

    def number(self, node: yaml.ScalarNode) -> Any:
        value = self.construct_scalar(node)
        if ":" in value:  # YAML 1.1 counts in sixties
            return value
        whole = node.tag.endswith("int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _name in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _Loader.number)

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The document's node, which has line numbers (None if empty), and its value."""
    if len(text) > MAX_BYTES:
        raise YamlError(f"has more than {MAX_BYTES >> 10} KiB")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _check_keys(node, {})
            value = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        reason = problem.problem or problem.context or "no reason given"
        raise YamlError(f"not YAML ({reason})", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as problem:
        raise YamlError(f"not YAML ({str(problem).splitlines()[0]})") from None
    except RecursionError:
        raise YamlError("nested too deep") from None
    except YamlError:
        raise
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as problem:
        # PyYAML does not catch the errors of dates, numbers and characters.
        raise YamlError(f"not YAML ({problem})") from None
    return node, value


def read_yaml(file: Path, refused: type[MoeFinetuneError]) -> Any:
    """The value in ``file``, None when it is empty."""
    return parse_file(file, refused)[1]


def parse_file(file: Path, refused: type[MoeFinetuneError]) -> tuple[yaml.Node | None, Any]:
    """:func:`parse_yaml` of a file; errors are raised as ``refused`` with file and line."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        return parse_yaml(raw.decode("utf-8"))
    except OSError as problem:
        raise refused(f"{file}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise refused(f"{file}: not UTF-8 at byte {problem.start}") from None
    except YamlError as problem:
        location = file if problem.line is None else f"{file}:{problem.line}"
        raise refused(f"{location}: {problem.problem}") from None


def _check_keys(node: yaml.Node, sizes: dict[int, int], path: tuple[str, ...] = ()) -> int:
    """The number of values in ``node``; refuse too many, and a key that a mapping sets twice.

    PyYAML would silently take the last of two keys. ``sizes`` has each visited node's number, 0
    while it is being counted.
    """
    if id(node) in sizes:  # an alias
        if not sizes[id(node)]:
            line = node.start_mark.line + 1
            raise YamlError("an alias is inside the value that it refers to", line)
        return sizes[id(node)]
    sizes[id(node)], size = 0, 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            size += _check_keys(item, sizes, (*path, str(index)))
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, child in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise YamlError("a key must be a word, not a list or mapping", line)
            child_path = (*path, name.value)
            if name.value in names:
                raise YamlError(f"{'.'.join(child_path):.200} is set twice in this file", line)
            names.add(name.value)
            size += 1 + _check_keys(child, sizes, child_path)
    if size > MAX_NODES:
        line = node.start_mark.line + 1
        raise YamlError(f"has more than {MAX_NODES:,} values once aliases are expanded", line)
    sizes[id(node)] = size
    return size
