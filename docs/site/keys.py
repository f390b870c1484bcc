"""The reference tables of keys, made from the classes that check them.

``python docs/site/keys.py`` (``make tables``) writes them into ``docs/reference``; a test asks that
they are current.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import TermOptions
from moe_finetune.losses.presets import PAPERS
from moe_finetune.metrics.words import WORDS
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import LIMITS, OWNED, STAGES
from moe_finetune.study.recipe import StudyRecipe
from moe_finetune.upcycle.schema import UpcycleRecipe

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
START, END = "<!-- keys: make tables -->\n", "<!-- end of keys -->\n"
HEAD = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
_NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true, false",
    type(None): "null",
}


def cell(text: str) -> str:
    """``text`` as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models(inner)


def words(annotation: Any) -> str:
    """What a key takes, for a reader."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return words(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(part) for part in inner))
    if origin in (list, tuple):
        return f"list of {words(inner[0])}"
    if origin is dict:
        return f"mapping to {words(inner[1])}" if inner[1] is not Any else "mapping"
    if annotation is Any:
        return "any"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default(field: Any) -> str:
    """A field's default as YAML would have it; nothing for a section, whose keys have their own."""
    value = field.default if field.default is not PydanticUndefined else None
    if field.default_factory is not None or isinstance(value, BaseModel):
        return ""
    if field.is_required():
        return "required"
    return f"`{json.dumps(value)}`" if value not in (None, {}, [], ()) else ""


def limits(field: Any) -> str:
    """The range of a number or the length of a list."""
    patterns = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {}"}
    found = [
        pattern.format(getattr(item, name))
        for item in field.metadata
        for name, pattern in patterns.items()
        if getattr(item, name, None) is not None
        and not (name == "min_length" and item.min_length == 1)
    ]
    return f" ({', '.join(found)})" if found else ""


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A row for each key, sections' own keys below them."""
    for name, field in model.model_fields.items():
        key, sections = f"{prefix}{name}", list(models(field.annotation))
        meaning = field.description or (summary(sections[0]) if len(sections) == 1 else "")
        if not meaning:
            raise SystemExit(f"{model.__name__}.{name}: has no description")
        takes = words(field.annotation) + limits(field)
        yield f"| `{key}` | {cell(takes)} | {cell(default(field))} | {cell(meaning)} |"
        listed = "[]" if "list of" in takes else ".NAME" if "mapping to" in takes else ""
        for section in sections:
            if (section is not model and section.__name__ not in ("Method",)) or name == "method":
                yield from rows(section, f"{key}{listed}.")


def summary(thing: Any) -> str:
    """The first sentence of a docstring, without roles of reStructuredText."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def recipe_tables() -> str:
    """Every key of a recipe."""
    meaning = "recipes that this one extends; paths are relative to it"
    extends = f"| `extends` | text or list of text |  | {meaning} |"
    return "\n".join([HEAD, extends, *rows(Recipe)])


def cited(text: str) -> str:
    """``text`` with the papers' numbers (P0 to P4) replaced by their titles."""
    for number, paper in PAPERS.items():
        text = text.replace(f"{number} ", f"*{paper.short}* ")
    return text


def loss_tables() -> str:
    """Options of every loss."""
    parts = ["## Options of every loss", HEAD, *rows(TermOptions)]
    for name, term in TERMS.items():
        own = [row for row in rows(term.Options) if row not in set(rows(TermOptions))]
        parts += ["", f"## `{name}`", f"{term.source}. Reads {term.reads}.", ""]
        parts += [HEAD, *own] if own else ["No further options."]
    return cited("\n".join(parts))


def hint(annotation: Any) -> str:
    """The type of a field of TRL's, enums and paths in a reader's words."""
    return words(annotation) if annotation is not None else ""


def trainer_table() -> str:
    """Fields of TRL's configs, and those that have another place in a recipe."""
    lines = ["## Set elsewhere", "| key | instead |", "| --- | --- |"]
    lines += [f"| `{name}` | {cell(why)} |" for name, why in sorted(OWNED.items())]
    seen: set[str] = set()
    for stage in STAGES.values():
        fields = [
            field for field in dataclasses.fields(stage.config_class())
            if field.init and field.name not in OWNED and (stage.config, field.name) not in seen
            and ("SFTConfig", field.name) not in seen
        ]  # fmt: skip
        if not fields:
            continue
        seen |= {(stage.config, field.name) for field in fields}
        more = "" if stage.name == "sft" else ", in addition to `SFTConfig`'s"
        lines += ["", f"## `stage: {stage.name}`: fields of `{stage.config}`{more}"]
        lines += ["| key | default | limits |", "| --- | --- | --- |"]
        for field in sorted(fields, key=lambda field: field.name):
            value = (
                ""
                if callable(field.default) or field.default in (None, dataclasses.MISSING)
                else field.default
            )
            shown = (
                f"`{json.dumps(getattr(value, 'value', value), default=str)}`"
                if value != ""
                else ""
            )
            number = limits(LIMITS[field.name]).strip(" ()") if field.name in LIMITS else ""
            lines.append(f"| `{field.name}` | {cell(shown)} | {number} |")
    return "\n".join(lines)


def log_table() -> str:
    """Every key of a log and figure of the page, by its place in ``metrics.words``."""
    lines = ["| key | name | meaning | better |", "| --- | --- | --- | --- |"]
    better = {1: "higher", -1: "lower", 0: ""}
    for key, about in WORDS.items():
        meaning = cell(about.meaning)
        lines.append(f"| `{key}` | {cell(about.name)} | {meaning} | {better[about.good]} |")
    return "\n".join(lines)


TABLES = {
    "log.md": log_table,
    "recipe.md": recipe_tables,
    "losses.md": loss_tables,
    "study.md": lambda: "\n".join([HEAD, *rows(StudyRecipe)]),
    "upcycle.md": lambda: "\n".join([HEAD, *rows(UpcycleRecipe)]),
    "trainer.md": trainer_table,
}


def written(name: str) -> str:
    """The file's text with a current table."""
    text = (REFERENCE / name).read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{TABLES[name]()}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write all tables."""
    for name in TABLES:
        (REFERENCE / name).write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    main()
