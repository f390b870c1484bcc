"""The fields of TRL's configs, read from the installed files by their syntax tree.

So that a recipe's keys are checked before TRL is imported. What a tree does not show (a base class
elsewhere, an unusual type) is judged after the import.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from moe_finetune.recipe.stages import Stage, section_of, trainer_section

_BASES = {"TrainingArguments": ("transformers", "training_args.py")}
"""Base classes that TRL imports from the top of another package, and where they are defined."""
_TYPES: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list": list,
    "None": None, "Any": Any, "Literal": Literal,
}  # fmt: skip


@functools.cache
def section_in_source(stage: Stage) -> type[BaseModel] | None:
    """The fields of the stage's config as a section, from source; None if a class is not found."""
    package = package_folder("trl")
    name = f"{stage.config.removesuffix('Config').lower()}_config.py"
    file = package and package / "trainer" / name
    try:
        fields = dict(_fields(file, stage.config)) if file else {}
    except (OSError, SyntaxError, LookupError):
        return None
    return section_of(stage, fields)


def trainer_keys(stage: Stage) -> type[BaseModel]:
    """The fields of the stage's config: from source, or of TRL's class where it shows none."""
    return section_in_source(stage) or trainer_section(stage)


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _fields(file: Path, name: str) -> Iterator[tuple[str, tuple[Any, tuple[str, ...]]]]:
    """Name, type and choices of a dataclass's fields, those of its bases first."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    for base in node.bases:
        yield from _fields(_file_of(file, tree, ast.unparse(base)), ast.unparse(base))
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        options = line.value.keywords if isinstance(line.value, ast.Call) else []
        values = {option.arg: option.value for option in options}
        in_init = values.get("init")
        if isinstance(in_init, ast.Constant) and in_init.value is False:
            continue
        hint, choices = _type(line.annotation), tuple[str, ...]()
        if isinstance(metadata := values.get("metadata"), ast.Dict):
            for key, value in zip(metadata.keys, metadata.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices":
                    try:
                        choices = tuple(ast.literal_eval(value))
                    except ValueError:  # computed by the module
                        hint = Any
        yield line.target.id, (hint, choices)


def _type(annotation: ast.expr) -> Any:
    """A type of plain names; Any for others."""
    if {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)} - _TYPES.keys():
        return Any
    try:
        return eval(ast.unparse(annotation), {"__builtins__": {}}, _TYPES)
    except (TypeError, NameError, SyntaxError, AttributeError):
        return Any


def _file_of(file: Path, tree: ast.Module, name: str) -> Path:
    """The file that defines a base class: this one, or the module that it is imported from."""
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        return file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            if node.level:
                folder = file.parents[node.level - 1]
                return folder.joinpath(*str(node.module).split(".")).with_suffix(".py")
            if name in _BASES and (package := package_folder(_BASES[name][0])):
                return package / _BASES[name][1]
    raise LookupError(name)
