"""What pydantic says, in a recipe's words."""

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.tree import Tree
from moe_finetune.recipe.validation import in_words
from moe_finetune.upcycle.recipe import load_upcycle_recipe


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Input should be less than 1", "less than 1"),
        ("Input should be a valid integer, got a number with a fractional part", "a whole number"),
        ("Input should be a valid boolean, unable to interpret input", "true or false"),
        ("String should have at least 1 character", "text that is not empty"),
        ("List should have at least 1 item after validation, not 0", "a list of at least one item"),
        ("Input should be 'a' or 'b'", "'a' or 'b'"),
    ],
)
def test_in_words(said, wanted):
    assert in_words(said) == wanted


def test_a_recipe_is_told_what_it_needs():
    values = {"trainer": {"max_steps": 3}, "lora": {"rank": -1}}
    with pytest.raises(RecipeError) as caught:
        recipe_from_tree(Tree(values))
    assert str(caught.value).splitlines() == [
        "model: required, but missing (it needs model.path)",
        "data: required, but missing (it needs data.train)",
        "lora.rank: must be 1 or more, not -1",
    ]


def test_a_default_that_other_errors_prevent_is_not_one_of_them(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: x}\n")
    with pytest.raises(RecipeError) as caught:
        load_upcycle_recipe([tmp_path / "r.yaml"])
    assert "dense: required" in str(caught.value)
    assert "arms" not in [line.partition(": ")[0] for line in str(caught.value).splitlines()]
