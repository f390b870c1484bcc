"""One wrong and one unusual value of every key of ``trainer:`` for DPO and GRPO: who refuses it?

``python -m tests.training.runs.sweep dpo grpo`` prints a line for each: refused when the recipe is read
("load"), by the rehearsal on a toy ("toy"), or not at all ("runs"). Some minutes.
"""

import dataclasses
import sys
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.stages import OWNED, STAGES
from moe_finetune.recipe.tree import Tree
from moe_finetune.training.rehearsal import rehearse, to_rehearse
from tests.support import tiny


def recipe_of(stage: str, **trainer: Any) -> Recipe:
    """A recipe of ``stage`` that reads no files."""
    rewards = {"rewards": ["exact_match"]} if stage == "grpo" else {}
    tree = {
        "stage": stage,
        "model": {"path": "m"},
        "method": "none",
        "lora": {"rank": 2},
        "data": {"train": "t.jsonl"},
        "trainer": trainer,
        **rewards,
    }
    return recipe_from_tree(Tree(tree))


def values_of(field: Any) -> tuple[Any, ...]:
    """A wrong and an unusual value for a field's type."""
    kind = str(field.type)
    for name, values in {
        "bool": (not field.default,),
        "list": (["foo"],),
        "dict": ({"foo": 1},),
        "int": (-5, 3),
        "float": (-1.0, 0.5, float("nan")),
        "str": ("foo",),
    }.items():
        if name in kind:
            return values
    return ("foo",)


def verdict(stage: str, name: str, value: Any, tokenizer: Any) -> str:
    """Who refuses a value."""
    try:
        recipe = recipe_of(stage, **{name: value})
    except RecipeError as error:
        return f"load: {str(error)[:90]}"
    if not to_rehearse(recipe):
        return "not rehearsed"
    problem = rehearse(recipe, tokenizer)
    return "runs" if problem is None else f"toy: {problem[:110]}"


def main() -> None:
    """Print the table."""
    tokenizer = tiny.tokenizer()
    for stage in sys.argv[1:] or ("dpo", "grpo"):
        for field in dataclasses.fields(STAGES[stage].config_class()):
            for value in values_of(field) if field.init and field.name not in OWNED else ():
                said = verdict(stage, field.name, value, tokenizer)
                print(f"{stage} | {field.name}: {value!r} | {said}", flush=True)


if __name__ == "__main__":
    main()
