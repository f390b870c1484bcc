"""What all sections of a recipe have in common."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from moe_finetune.errors import RecipeError

SECRET = re.compile(
    r"((hub|access|auth|api|bearer|hf)_?token|api_?key|secret|password|credential)", re.I
)
"""Names of keys whose values are secrets."""
_TOKEN = re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{20,}|\b(sk-)[A-Za-z0-9_-]{40,}")
"""Secrets with a known form: tokens of the hub and of OpenAI. Folder names are shorter."""
_ASSIGNED = re.compile(r"(?<![\w.])([\w.]+)=[^\s'\",;]+")
"""A dotted key and its value. A match starts only where a word does, so long words take no time."""


class Section(BaseModel):
    """A mapping of the recipe; unknown keys and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False)


class WholeRecipe(Section):
    """A resolved recipe that is saved with its results."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for key, value in leaves(self.model_dump()):
            name = key.rstrip(".0123456789").rpartition(".")[2]
            if isinstance(value, str) and value and SECRET.search(name):
                raise RecipeError(
                    f"{key}: secrets stay out of recipes, which are stored with the run; set it in "
                    "the environment (HF_TOKEN, OPENAI_API_KEY), or use `hf auth login`"
                )
        return self

    def to_mapping(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML; loading it gives an equal recipe."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)


def hide_secrets(text: str) -> str:
    """``text`` with stars for tokens and for values assigned to keys such as ``hf_token``."""
    return _TOKEN.sub(r"\1\2***", _ASSIGNED.sub(_starred, text))


def _starred(assigned: re.Match[str]) -> str:
    name = assigned[1].rpartition(".")[2]
    secret = name.lower() == "token" or SECRET.search(name)
    return f"{assigned[1]}=***" if secret else assigned[0]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values in mappings and lists; an empty mapping has none."""
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and value):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
