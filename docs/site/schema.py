"""The JSON schema of recipes, for editors: keys, types, limits and descriptions.

``python docs/site/schema.py`` (``make tables``) writes ``recipes/recipe.schema.json``; a test asks
that it is current, and that every shipped recipe is valid under it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from moe_finetune.losses import TERMS
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import OWNED, STAGES

FILE = Path(__file__).resolve().parents[2] / "recipes" / "recipe.schema.json"
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def schema() -> dict[str, Any]:
    """The schema of one recipe file; no key is required, since files extend each other."""
    whole = Recipe.model_json_schema()
    definitions: dict[str, Any] = whole["$defs"]
    for definition in definitions.values():
        definition.pop("required", None)
    properties: dict[str, Any] = {
        "extends": {**TEXTS, "description": "recipes that this one extends, relative to it"},
        **whole["properties"],
    }
    properties["method"] = {"anyOf": [_presets(), _method(definitions.pop("Method"))]}
    items = properties["rewards"]["items"]
    properties["rewards"]["items"] = {"anyOf": [items, {"type": "string"}]}
    definitions |= {name: _options(term, definitions) for name, term in TERMS.items()}
    properties["trainer"] = {
        "type": "object",
        "description": "fields of the stage's config in TRL",
        "properties": {name: {"description": _stages(name)} for name in sorted(_trainer_fields())},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of moe-finetune",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _presets() -> dict[str, Any]:
    """A preset's name; a plugin may register others, so the names are examples."""
    return {"type": "string", "examples": sorted(PRESETS)}


def _method(section: dict[str, Any]) -> dict[str, Any]:
    """The ``method:`` mapping: resolved terms have all options, written ones a few or a weight."""
    properties = dict(section["properties"])
    properties["preset"] = _presets()
    properties["terms"] = {
        "type": "object",
        "description": properties["terms"].get("description", ""),
        "properties": {
            name: {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": ["number", "null"]}]}
            for name in TERMS
        },
    }
    return {**section, "properties": properties}


def _options(term: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = term.Options.model_json_schema()
    for name, definition in options.pop("$defs", {}).items():
        definition.pop("required", None)
        definitions.setdefault(name, definition)
    options.pop("required", None)
    return options


def _trainer_fields() -> set[str]:
    configs = (stage.config_class() for stage in STAGES.values())
    return {field.name for config in configs for field in dataclasses.fields(config)} - set(OWNED)


def _stages(name: str) -> str:
    """The stages whose config has a field."""
    stages = [
        stage.name
        for stage in STAGES.values()
        if name in {field.name for field in dataclasses.fields(stage.config_class())}
    ]
    return "" if len(stages) == len(STAGES) else f"of stage {', '.join(stages)}"


def text() -> str:
    """The file's text."""
    return json.dumps(schema(), indent=1, ensure_ascii=False, sort_keys=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
