"""Dropped keys are ignored at their old default; other values are in training/refusals.json."""

import pytest

from moe_finetune.recipe.schema import load_recipe

RECIPE = "model: {path: m}\ndata: {train: a.jsonl}\n"
NUMERICS = "on_nan: stop, max_violation: null, dead_experts: 0.5, patience: 5, deterministic: false"
DEFAULTS = [
    f"numerics={{{NUMERICS}}}",
    "teacher=null",
    "method.strength.every=null",
    "method.terms.variance={weight: 0, reduction: mean, tokens: null}",
    "method.terms.orthogonality={weight: 0, one_sided: false}",
    "lora.use_dora=false",
    "lora.loraplus_lr_ratio=null",
]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    return path


def test_old_defaults_are_ignored(recipe):
    assert load_recipe(recipe, DEFAULTS).hash == load_recipe(recipe, ["method.terms={}"]).hash


def test_a_weight_on_a_sum_is_read_as_one_on_the_mean(recipe):
    terms = "method.terms={variance: {weight: 0.001, reduction: sum, tokens: 16384}}"
    assert load_recipe(recipe, [terms]).method.terms["variance"].weight == 16.384
    share = "method.terms={variance: {share: 0.1, reduction: sum, tokens: 16384}}"
    assert load_recipe(recipe, [share]).method.terms["variance"].share == 0.1
