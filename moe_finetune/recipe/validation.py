"""Pydantic's errors in a recipe's terms: one line per key, what is expected, the nearest name."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moe_finetune.errors import MoeFinetuneError, RecipeError, did_you_mean
from moe_finetune.recipe.stages import OWNED, STAGES
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
    # So that the required keys of a missing section are named.
    empty: dict[str, Any] = {
        name: {}
        for name, field in model.model_fields.items()
        if field.is_required() and _has_required_keys(field.annotation)
    }
    try:
        return model.model_validate({**empty, **defaults, **tree.values})
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
            lines.append(f"{key}: unknown key{_nearest(model, item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"{key}: required, but missing")
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


def _is_union_tag(part: str | int) -> bool:
    """Return whether ``part`` is a branch of a union, as in ``list[str]`` or ``DataSource``."""
    if not isinstance(part, str):
        return False
    # recipe keys are lower case, so a capital begins the name of a section's class
    return part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()


def _nearest(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """``; did you mean ...``: a key of the same section, else one of this name in another."""
    section, name = model, str(loc[-1])
    for part in loc[:-1]:
        field = section.model_fields.get(str(part))
        section = next(_models(field.annotation), section) if field else section
    names = list(section.model_fields)
    if not difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        if "trainer" in model.model_fields:
            fields = dataclasses.fields(STAGES["sft"].config_class())
            if name in {field.name for field in fields} - OWNED.keys():
                return f"; did you mean 'trainer.{name}'?"
        if key := key_of(model, name):
            return f"; did you mean '{key}'?"
    return did_you_mean(name, names)


def key_of(model: type[BaseModel], name: str) -> str | None:
    """The dotted key of this name in a section, the highest one; None if none or several are."""
    keys = {key for key in _keys(model) if key.rpartition(".")[2] == name and "." in key}
    highest = [key for key in keys if key.count(".") == min(k.count(".") for k in keys)]
    return highest[0] if len(highest) == 1 else None


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _models(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")


def _has_required_keys(annotation: Any) -> bool:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_section and any(f.is_required() for f in annotation.model_fields.values())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
