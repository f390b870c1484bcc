"""What all sections of a recipe have in common."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of the recipe: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False)


class WholeRecipe(Section):
    """A recipe that has been resolved and is saved with what it made."""

    def to_mapping(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML; what loads recipes reads it back to an equal one."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)
