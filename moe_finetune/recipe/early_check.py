"""What is wrong with a recipe's keys, before torch and TRL are imported."""

import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, create_model

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.explain_errors import check_trainer, from_tree, placed
from moe_finetune.recipe.fields_of_trl import section_in_source
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import Tree

_AFTER_IMPORT = ("method", "trainer")
"""Keys whose rules need the losses or TRL."""


def check_early(tree: Tree, recipe: type[BaseModel]) -> None:
    """Refuse unknown keys and values of the wrong type; does nothing if TRL is imported already.

    Args:
        recipe: the class whose fields are the keys.
    """
    if "trl" not in sys.modules:
        early_sections(tree, recipe)


def early_sections(tree: Tree, recipe: type[BaseModel]) -> Any:
    """The sections that need no library, validated; refuses wrong keys of all."""
    fields: dict[str, Any] = {
        name: (Any, None) if name in _AFTER_IMPORT else (field.annotation, field)
        for name, field in recipe.model_fields.items()
    }
    problems: list[str] = []
    sections = None
    try:
        sections = from_tree(create_model("Recipe", __base__=recipe.__base__, **fields), tree)
    except RecipeError as error:
        problems = str(error).split("\n")
    stage, trainer = STAGES.get(str(tree.values.get("stage") or "sft")), tree.values.get("trainer")
    if isinstance(trainer, Mapping) and stage is not None and section_in_source(stage) is not None:
        lines = list(check_trainer(trainer, stage, section_in_source))
        keys = tuple(line.partition(":")[0] for line in lines)  # which say more of the same key
        problems = [line for line in problems if not any(f"{key}:" in line for key in keys)]
        problems += [placed(tree, line) for line in lines]
    if problems:
        raise RecipeError("\n".join(problems))
    return sections
