"""What a recipe that cannot be validated is told."""

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.tree import Tree


def test_a_recipe_is_told_what_it_needs():
    values = {"trainer": {"max_steps": 3}, "lora": {"rank": -1}}
    with pytest.raises(RecipeError) as caught:
        recipe_from_tree(Tree(values))
    assert str(caught.value).splitlines() == [
        "model.path: required, but missing",
        "data.train: required, but missing",
        "lora.rank: must be greater than or equal to 1, not -1",
    ]
