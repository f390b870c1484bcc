"""The one reader of YAML: data only, small, finite, and without a key that is set twice.

Aliases and merge keys (``*name``, ``<<``) are read, but what they expand to is counted first: nine
lines of them can stand for gigabytes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.json_file import MAX_DIGITS, MAX_NESTING, TextError, check_nesting

MAX_BYTES = 1 << 20
MAX_VALUES = 50_000


class YamlError(TextError):
    """Text that is not YAML, or not of the kind that is read here."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with ``1e-3`` read as a number (YAML 1.1 reads it as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The document's node (None when it is empty), which knows lines, and its value.

    Raises:
        YamlError: not YAML; too large, too deep, or too many values once aliases are expanded; a
            key twice in a mapping; a number with too many digits; half a surrogate pair.
    """
    if len(text) > MAX_BYTES:
        raise YamlError(f"has more than {MAX_BYTES >> 10} KiB")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _count(node, {})
            value = loader.construct_document(node)
        finally:
            loader.dispose()
        check_nesting(value)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        reason = problem.problem or problem.context or "no reason given"
        raise YamlError(f"not YAML ({reason})", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as problem:
        raise YamlError(f"not YAML ({str(problem).splitlines()[0]})") from None
    except RecursionError:
        raise YamlError(f"nested more than {MAX_NESTING} deep") from None
    except YamlError:
        raise
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as problem:
        # PyYAML lets through what dates, numbers and characters raise.
        raise YamlError(f"not YAML ({problem})") from None
    return node, value


def read_yaml(file: Path, refused: type[MoeFinetuneError], remedy: str = "") -> Any:
    """The value in ``file``, None when it is empty.

    Raises:
        refused: it cannot be read or see :func:`parse_yaml`; the message ends with ``remedy``.
    """
    return parse_file(file, refused, remedy)[1]


def parse_file(
    file: Path, refused: type[MoeFinetuneError], remedy: str = ""
) -> tuple[yaml.Node | None, Any]:
    """:func:`parse_yaml` of a file, with its errors as ``refused`` and by file and line."""
    end = f"; {remedy}" if remedy else ""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        return parse_yaml(raw.decode("utf-8"))
    except OSError as problem:
        raise refused(f"{file}: cannot be read ({problem.strerror}){end}") from None
    except UnicodeDecodeError as problem:
        raise refused(f"{file}: not UTF-8 at byte {problem.start}{end}") from None
    except YamlError as problem:
        place = file if problem.line is None else f"{file}:{problem.line}"
        raise refused(f"{place}: {problem.problem}{end}") from None


def _count(node: yaml.Node, sizes: dict[int, int], path: tuple[str, ...] = ()) -> int:
    """Values in ``node`` with every alias expanded; ``sizes`` holds those of nodes seen before."""
    line = node.start_mark.line + 1
    if len(path) > MAX_NESTING:
        raise YamlError(f"nested more than {MAX_NESTING} deep", line)
    known = sizes.get(id(node))
    if known is not None:
        if known == 0:
            raise YamlError("an alias is inside the value that it refers to", line)
        return known
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, line)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_count(item, sizes, (*path, str(i))) for i, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, child in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise YamlError("a key must be a word, not a list or mapping", line)
            below = (*path, name.value)
            if name.value in seen:
                raise YamlError(
                    f"{'.'.join(below):.200} is set twice in this file", name.start_mark.line + 1
                )
            seen.add(name.value)
            size += _count(name, sizes, below) + _count(child, sizes, below)
    if size > MAX_VALUES:
        raise YamlError(f"expands to more than {MAX_VALUES:,} values", line)
    sizes[id(node)] = size
    return size


def _check_scalar(node: yaml.ScalarNode, line: int) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in node.value):
        raise YamlError("contains half of a surrogate pair, which is not a character", line)
    if node.tag.endswith(":int") and len(node.value) > 3 * MAX_DIGITS:
        raise YamlError(f"a whole number of {len(node.value)} digits", line)
