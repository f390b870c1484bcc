"""Dropped keys: ignored at their old default, otherwise refused with their replacement."""

import pytest

from moe_finetune.errors import RecipeError
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
REFUSED = [
    ("method.terms.variance.reduction=sum", "variance.reduction: was dropped; a weight multiplies"),
    ("method.terms.variance={weight: 0.01, reduction: sum}", "variance.reduction: was dropped"),
    ("method.terms.variance={weight: 0.01, tokens: 9}", "variance.tokens: was dropped; a weight"),
    ("method.terms.orthogonality={weight: 1, one_sided: true}", "one_sided: was dropped; both ve"),
    ("stages=[{stage: sft}]", "stages: give each stage its own run: train next.yaml model.path="),
    ("data.date=2026-02-03", "data.date: chat templates write the date of the day on which"),
    ("data.ignore=[images]", "data.ignore: remove the columns or fields from the rows"),
    ("method.strength.every=9", "method.strength.every: give a term its own every, or call moe_"),
    ("numerics=5", "numerics: was dropped; a loss that is not finite stops the run"),
    ("numerics.on_nan=skip", "numerics.on_nan: steps are no longer skipped; lower trainer.lea"),
    ("numerics.deterministic=true", "numerics.deterministic: set trainer.full_determinism: true"),
    ("numerics.patience=3", "numerics.patience: a collapse is reported after 5 logs"),
    ("lora.use_dora=true", "lora.use_dora: was dropped; give your PEFT model and"),
    ("lora.loraplus_lr_ratio=16", "lora.loraplus_lr_ratio: LoRA+ was dropped; give"),
    ("lora.init=pissa", "lora.init: 'pissa' was dropped (kept: kaiming, gaussian); give"),
    ("lora.init=pissa_niter_4", "lora.init: 'pissa_niter_4' was dropped"),
    ("lora.init=olora", "lora.init: 'olora' was dropped"),
    ("lora.init=orthogonal", "lora.init: 'orthogonal' was dropped"),
    ("teacher=other", "teacher: stage distill was dropped; SpecializationCallback"),
    ("stage=kto", "stage: 'kto' was dropped (kept: sft, pretrain, dpo, grpo); Special"),
    ("stage=orpo", "stage: 'orpo' was dropped"),
    ("stage=distill", "stage: 'distill' was dropped"),
    ("method.terms.teacher_routing={weight: 1.0}", "method.terms.teacher_routing: was dropped"),
]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    return path


def test_old_defaults_are_ignored(recipe):
    assert load_recipe(recipe, DEFAULTS).hash == load_recipe(recipe, ["method.terms={}"]).hash


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_other_values_are_refused_in_one_line(recipe, override, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"override '{override}': ")


def test_a_weight_on_a_sum_is_read_as_one_on_the_mean(recipe):
    terms = "method.terms={variance: {weight: 0.001, reduction: sum, tokens: 16384}}"
    assert load_recipe(recipe, [terms]).method.terms["variance"].weight == 16.384
    share = "method.terms={variance: {share: 0.1, reduction: sum, tokens: 16384}}"
    assert load_recipe(recipe, [share]).method.terms["variance"].share == 0.1
