"""What all sections of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of the recipe: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False)
