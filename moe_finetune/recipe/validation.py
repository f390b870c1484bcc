"""Pydantic's errors in a recipe's terms: one line per key, what is expected, the nearest name."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moe_finetune.errors import MoeFinetuneError, RecipeError, did_you_mean
from moe_finetune.recipe.owned import OWNED
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.tree import Key, Tree, dotted

Model = TypeVar("Model", bound=BaseModel)


def from_tree(
    model: type[Model], tree: Tree, refused: type[MoeFinetuneError] = RecipeError, **defaults: Any
) -> Model:
    """Validate merged values, with ``defaults`` for missing keys.

    Raises:
        RecipeError (or ``refused``): one line for each problem, with where it was written and the
            dotted key.
    """
    try:
        return model.model_validate({**defaults, **tree.values})
    except ValidationError as error:
        lines = describe(model, error)
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON escapes allow
        lines = [f"{error.object!a} contains characters that cannot be encoded in UTF-8"]
    raise refused("\n".join(placed(tree, line) for line in lines))


def placed(tree: Tree, line: str) -> str:
    """``line``, which starts with a dotted key, with the file and line that set the key."""
    key = tuple(int(p) if p.isdigit() else p for p in line.partition(": ")[0].split("."))
    origin = tree.origin(key)
    return f"{origin}: {line}" if origin else line


def describe(model: type[BaseModel], error: ValidationError, prefix: Key = ()) -> list[str]:
    """Pydantic's errors as one line per key: ``key.path``, the value, and what is expected."""
    expected: dict[tuple[str, str], list[str]] = {}  # by key and value
    lines: list[str] = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, MoeFinetuneError):
            lines += str(cause).split("\n")
            continue
        key = dotted((*prefix, *(part for part in item["loc"] if not _is_union_tag(part))))
        if item["type"] == "default_factory_not_called":  # the other errors are why
            continue
        if item["type"] == "extra_forbidden":
            names = _fields_at(model, item["loc"][:-1])
            name = str(item["loc"][-1])
            hint = did_you_mean(name, names)
            is_typo = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
            if not is_typo and (elsewhere := _elsewhere(model, name)):
                hint = f"; did you mean '{elsewhere}'?"
            lines.append(f"{key}: unknown key{hint}")
        elif item["type"] == "missing":
            inner = _required(model, item["loc"])
            needs = f" (it needs {', '.join(f'{key}.{name}' for name in inner)})" if inner else ""
            lines.append(f"{key}: required, but missing{needs}")
        elif cause is not None:
            lines.append(f"{key}: {cause}")
        elif item["msg"].startswith("Input should be "):
            got = f"{item['input']!r:.200}"
            expected.setdefault((key, got), []).append(expectation(item["msg"]))
        else:
            lines.append(f"{key}: {item['msg']}")
    keys = [line.partition(": ")[0] for line in lines] + [key for key, _ in expected]
    return lines + [
        f"{key}: must be {' or '.join(dict.fromkeys(texts))}, not {got}"
        for (key, got), texts in expected.items()
        # the branch of a union whose error is deepest is the one that was meant
        if not any(other.startswith(f"{key}.") for other in keys)
    ]


def expectation(message: str) -> str:
    """What a message of pydantic expects (``a valid integer``), with YAML's name for None."""
    text = message.removeprefix("Input should be ")
    return "null" if text == "None" else text


def _required(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Required keys of the section at ``loc``; empty if it is not a section."""
    sections: list[type[BaseModel]] = [model]
    for part in loc:
        if not sections or part not in sections[0].model_fields:
            return []
        sections = list(_models(sections[0].model_fields[str(part)].annotation))
    fields = sections[0].model_fields.items() if len(sections) == 1 else ()
    return [name for name, field in fields if field.is_required()]


def _is_union_tag(part: str | int) -> bool:
    """Return whether ``part`` is a branch of a union, as in ``list[str]`` or ``DataSource``."""
    if not isinstance(part, str):
        return False
    # recipe keys are lower case, so a capital begins the name of a section's class
    return part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()


def _elsewhere(model: type[BaseModel], name: str) -> str | None:
    """The dotted key of this name in another section; None if none or several have it."""
    if "trainer" in model.model_fields:
        stage = STAGES["sft"]
        fields = {field.name for field in dataclasses.fields(stage.config_class())}
        if name in fields - OWNED.keys():
            return f"trainer.{name}"
    return in_a_section(model, name)


def in_a_section(model: type[BaseModel], name: str, prefix: str = "", depth: int = 3) -> str | None:
    """The dotted key of this name in a section of ``model``; None if none or several have it."""
    places = []
    for key, field in model.model_fields.items():
        for section in _models(field.annotation) if depth else ():
            if name in section.model_fields:
                places.append(f"{prefix}{key}.{name}")
            elif deeper := in_a_section(section, name, f"{prefix}{key}.", depth - 1):
                places.append(deeper)
    places = list(dict.fromkeys(places))
    return places[0] if len(places) == 1 else None


def _fields_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    for part in loc:
        field = model.model_fields.get(str(part))
        nested = list(_models(field.annotation)) if field else []
        if nested:
            model = nested[0]
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
