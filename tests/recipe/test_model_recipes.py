"""Recipes of published models: what they target exists, and their memory plans are current."""

import pytest
import torch

from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.class_structure import meta_model
from moe_finetune.models.small_configs import of_first_layers
from tests.published import fixture
from tests.support.documents import script

plans = script("plans")
pytestmark = pytest.mark.more
LAYERS = 6  # of each kind at least one


@pytest.mark.parametrize("name", plans.FILES)
def test_a_recipe_of_a_model_reaches_what_it_targets(name):
    recipe, config = plans.recipe_of(name), plans.config_of(name)
    assert recipe.lora is not None
    published = fixture.read(plans.FIXTURES.get(name, name))
    parts = {row.part for row in published.rows if row.adapted} - {"router"}
    targets = {target.replace("_", " ") for target in recipe.lora.targets}
    assert targets == {part.removeprefix("routed ") for part in parts}
    with torch.device("meta"):
        model = add_lora(
            meta_model(of_first_layers(config, LAYERS)), recipe.lora, recipe.router.train
        )
    groups = lora_coverage(model).groups
    assert all(groups[part].reached_parameters > 0 for part in parts)
    lines = plans.FILES[name].read_text(encoding="utf-8").splitlines()
    plan = next(index for index, line in enumerate(lines) if line.startswith(plans.START))
    for (count, gib), line in zip(plans.GPUS, lines[plan + 1 :], strict=False):
        assert line.startswith(f"#   {count} x {gib} GB: ") and "fit" in line


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("olmoe_1b_7b", plans.GPUS),
        ("gpt_oss_20b", plans.GPUS[1:]),  # changes for 24 GB take twenty plans
        ("mixtral_8x7b", plans.GPUS[2:]),
    ],
)
def test_memory_plans_are_current(name, gpus):
    first, *fits = plans.head(name, gpus).splitlines()
    lines = plans.FILES[name].read_text(encoding="utf-8").splitlines()
    assert {first, *fits} <= set(lines), "run `make plans`"
