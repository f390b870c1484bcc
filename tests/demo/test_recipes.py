"""The demo's recipes are complete but for what is made on the spot."""

from pathlib import Path

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.recipe.schema import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "demo"


@pytest.mark.parametrize("method", ["aux_loss", "orthogonal_variance"])
def test_the_two_fine_tunes_differ_in_their_method_alone(method):
    recipe = load_recipe(FOLDER / f"{method}.yaml", ["model.path=somewhere"])
    assert recipe.method.preset == method
    shared = load_recipe(FOLDER / "demo.yaml", ["model.path=somewhere"]).to_mapping()
    assert {**recipe.to_mapping(), "method": None} == {**shared, "method": None}
    # The experts' grouped products need ranks of whole 16 bytes in float32.
    assert recipe.lora is not None and recipe.lora.rank is not None and recipe.lora.rank % 4 == 0


def test_without_a_checkpoint_they_say_so():
    with pytest.raises(RecipeError, match=r"model\.path: required, but missing"):
        load_recipe(FOLDER / "aux_loss.yaml")


def test_the_rows_of_the_suite_and_of_the_stages_are_shipped():
    suite = load_suite("demo")
    files = {file for task in suite.tasks for file in task.files.values()}
    assert files == {"arithmetic_test.jsonl", "code_test.jsonl", "prose_test.jsonl"}
    shipped = {file.name for file in FOLDER.glob("*.jsonl")}
    others = ("train", "validation", "preferences", "prompts", "prompts_test", "texts")
    assert shipped == files | {f"{name}.jsonl" for name in others}
