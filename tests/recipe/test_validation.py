"""What a recipe that cannot be validated is told."""

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.tree import Tree
from moe_finetune.upcycle.recipe import load_upcycle_recipe


def test_a_recipe_is_told_what_it_needs():
    values = {"trainer": {"max_steps": 3}, "lora": {"rank": -1}}
    with pytest.raises(RecipeError) as caught:
        recipe_from_tree(Tree(values))
    assert str(caught.value).splitlines() == [
        "model.path: required, but missing",
        "data.train: required, but missing",
        "lora.rank: must be greater than or equal to 1, not -1",
    ]


def test_a_default_that_other_errors_prevent_is_not_one_of_them(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: x}\n")
    with pytest.raises(RecipeError) as caught:
        load_upcycle_recipe([tmp_path / "r.yaml"])
    assert "dense: required" in str(caught.value)
    assert "arms" not in [line.partition(": ")[0] for line in str(caught.value).splitlines()]
