"""Which recipes a run may be resumed with."""

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.conflicts import check_resumable
from moe_finetune.recipe.schema import load_recipe

BASE = """
model: {path: m}
method: {terms: {variance: {share: 0.1, every: 10}}}
lora: {rank: 4, alpha: 8}
data: {train: t.jsonl, validation: v.jsonl}
trainer: {max_steps: 7, save_steps: 2}
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(BASE)
    return lambda *overrides: load_recipe(file, overrides)


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("evaluation={suite: demo, every: 2}", {"evaluation.suite", "evaluation.every"}),
        ("export.merge=false", {"export.merge", "export.verify"}),
        ("method.strength.first=false", {"method.strength.first"}),
        ("data.num_proc=2", {"data.num_proc"}),
        ("trainer.save_steps=3", {"trainer.save_steps"}),
        ("trainer.logging_steps=1", {"trainer.logging_steps"}),
        ("trainer.eval_steps=1", {"trainer.eval_steps"}),
        ("trainer.report_to=none", {"trainer.report_to"}),
        ("lora.rank=4", set()),
    ],
)
def test_what_was_trained_stays(recipe, override, keys):
    assert keys <= {*check_resumable(recipe(), recipe(override), "saved.yaml")}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("lora.rank=5", "lora.rank: 4, now 5"),
        ("lora=null", "lora.rank: 4, now not set"),
        ("method.terms.variance.every=20", "method.terms.variance.every: 10, now 20"),
        ("method.terms.variance.share=0.2", "method.terms.variance.share: 0.1, now 0.2"),
        ("method.terms.z_loss.weight=0.2", "method.terms.z_loss.weight: not set, now 0.2"),
        ("trainer.max_steps=8", "trainer.max_steps: 7, now 8"),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate: not set, now 1e-05"),
        ("trainer.full_determinism=true", "trainer.full_determinism: not set, now True"),
        ("data.validation=w.jsonl", "data.validation: 'v.jsonl', now 'w.jsonl'"),
        ("model.path=n", "model.path: 'm', now 'n'"),
        ("stage=dpo", "stage: 'sft', now 'dpo'"),
    ],
)
def test_another_training_is_refused_by_its_keys(recipe, override, line):
    with pytest.raises(RecipeError, match=r"--resume: .*saved\.yaml") as caught:
        check_resumable(recipe(), recipe(override, "trainer.save_steps=3"), "saved.yaml")
    lines = str(caught.value).splitlines()
    assert f"  {line}" in lines and not any("save_steps" in each for each in lines)


MAPPING = "data.train=[{path: t.jsonl}]"
LISTED = "data.train=[t.jsonl]"


@pytest.mark.parametrize("started", [None, LISTED, MAPPING])
@pytest.mark.parametrize("resumed", [None, LISTED, MAPPING])
def test_a_source_may_be_written_in_each_of_its_ways(recipe, started, resumed):
    """A path, a list of one, and a mapping of only a path read the same rows."""
    earlier, now = (recipe(*filter(None, [form])) for form in (started, resumed))
    assert check_resumable(earlier, now, "saved.yaml") == []
    moved = recipe((resumed or "data.train=t.jsonl").replace("t.jsonl", "moved.jsonl"))
    (changed,) = check_resumable(earlier, moved, "saved.yaml", by_content={"data.train"})
    assert changed.startswith("data.train")
    with pytest.raises(RecipeError, match=r"data\.train.*'t\.jsonl', now 'moved\.jsonl'"):
        check_resumable(earlier, moved, "saved.yaml")


@pytest.mark.parametrize("started", [None, LISTED, MAPPING])
@pytest.mark.parametrize(
    ("sources", "line"),
    [
        ("[{path: t.jsonl, limit: 4}]", r"data\.train\.0\.limit: .*, now 4"),
        ("[t.jsonl, u.jsonl]", r"data\.train\.1: not set, now 'u\.jsonl'"),
        ("[{path: t.jsonl}, u.jsonl]", r"data\.train\.1: not set, now 'u\.jsonl'"),
    ],
)
def test_another_share_or_another_source_is_refused(recipe, started, sources, line):
    earlier, now = recipe(*filter(None, [started])), recipe(f"data.train={sources}")
    with pytest.raises(RecipeError, match=line) as caught:
        check_resumable(earlier, now, "saved.yaml", by_content={"data.train"})
    assert str(caught.value).count("data.train") == 1
