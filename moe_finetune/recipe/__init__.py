"""Recipes: YAML files as one tree, its sections and methods, validated.

``tree`` reads files with ``extends`` and overrides; ``sections`` and ``method`` define the keys;
``schema`` combines them into one :class:`~moe_finetune.recipe.schema.Recipe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe, load_recipe, recipe_from_tree

__all__ = ["Recipe", "load_recipe", "recipe_from_tree"]


def __getattr__(name: str) -> Any:
    """Import the schema when it is first used: reading a tree does not need the losses."""
    if name not in __all__:
        raise AttributeError(f"module 'moe_finetune.recipe' has no attribute '{name}'")
    from moe_finetune.recipe import schema

    return getattr(schema, name)
