"""A run looks at its disk before it trains: it used to lose all steps at the end."""

import shutil
from types import SimpleNamespace

import pytest

from moe_finetune.errors import DiskSpaceError
from moe_finetune.io import folder
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.run import plan_run, run_recipe
from moe_finetune.training.run import checkpoint_and_rows, train
from moe_finetune.training.run.step_count import checkpoints_at_once
from tests.support.recipes import recipe_of


@pytest.mark.parametrize("begin", [run_recipe, plan_run])
def test_a_run_that_does_not_fit_is_refused_before_its_weights_load(
    begin, tiny_checkpoint, tmp_path, monkeypatch
):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab " * 9}] * 4)
    usage = shutil.disk_usage(tmp_path)
    few = SimpleNamespace(total=usage.total, used=usage.used, free=6_000_000)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: few)
    monkeypatch.setattr(train, "trainable_model", lambda start: pytest.fail("weights were loaded"))
    with pytest.raises(DiskSpaceError, match="MB are needed, but only 6 MB are free"):
        begin(recipe_of(tiny_checkpoint("qwen3_moe"), tmp_path / "rows.jsonl"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("trainer", "steps", "count"),
    [
        ({}, 40, 1),  # the last step's
        ({"save_steps": 10}, 40, 3),
        ({"save_steps": 10, "save_total_limit": 9}, 40, 4),
        ({"save_steps": 0.5}, 40, 2),
        ({"save_strategy": "no"}, 40, 0),
    ],
)
def test_the_checkpoints_that_lie_on_the_disk_at_once(trainer, steps, count):
    assert checkpoints_at_once({"save_total_limit": 2, **trainer}, steps) == count


PAIRS = [
    {"prompt": f"{i}: ", "chosen": f"yes {i * i}", "rejected": f"no {7 - i}"} for i in range(9)
]
STAGES = {
    "an adapter": (
        [{"text": f"word {i} " * 5} for i in range(9)],
        {"export": {"merge": True, "verify": False}},
    ),
    "a model whose reference follows it": (
        PAIRS,
        {
            "stage": "dpo", "lora": None, "router": {"train": "full"},
            "trainer": {"sync_ref_model": True, "ref_model_sync_steps": 2},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAGES)
def test_the_bytes_that_are_asked_for_are_those_that_the_run_writes(
    tiny_checkpoint, tmp_path, monkeypatch, case
):
    rows, sections = STAGES[case]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    steps = {"max_steps": 3, "save_steps": 1, "save_total_limit": 9, "learning_rate": 1e-4}
    sections = {**sections, "trainer": {**steps, **sections.get("trainer", {})}}
    asked = []
    monkeypatch.setattr(checkpoint_and_rows, "check_space", lambda path, size: asked.append(size))
    recipe = recipe_of(tiny_checkpoint("qwen3_moe"), tmp_path / "rows.jsonl", **sections)
    run = run_recipe(recipe, tmp_path / "run")
    sizes = [path.stat().st_size for path in run.rglob("*.safetensors")]
    assert len(list((run / "checkpoints").glob("checkpoint-*"))) == 3
    assert asked and asked[0] == pytest.approx(sum(sizes), rel=0.03)
