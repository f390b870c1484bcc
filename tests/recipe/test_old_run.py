"""A run folder of an earlier version, whose recipe.yaml has keys that were dropped since.

``run_of_0_1`` was written at commit f50b9f9b: two steps on a tiny Qwen3-MoE with defaults.
"""

import json
import shutil

import pytest

from moe_finetune import cli
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import load_recipe
from tests import tiny
from tests.conftest import ROOT
from tests.evaluation.local import write_suite


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "tests" / "recipe" / "run_of_0_1", tmp_path / "old")
    tiny.save("qwen3_moe", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "old"


def test_its_recipe_loads_and_saves_as_a_recipe_of_today(old_run):
    text = (old_run / "recipe.yaml").read_text()
    # Those versions recorded the date that a chat template wrote.
    (old_run / "recipe.yaml").write_text(text.replace("  date: null", "  date: 2026-02-03"))
    assert "numerics:" in text and "teacher:" in text and "use_dora:" in text
    recipe = load_recipe(old_run / "recipe.yaml")
    assert recipe.method.preset == "orthogonal_variance" and recipe.lora.rank == 1
    assert "numerics" not in recipe.to_yaml()
    assert recipe.method == resolve_method("orthogonal_variance")


def test_merge_eval_report_and_compare_work(old_run, tmp_path, capsys):
    assert cli.main(["merge", "old", "--output", "old/merged", "--verify"]) == 0
    suite = write_suite(tmp_path / "suite", items=3)
    command = ["eval", "old", "--suite", str(suite), "--backend", "hf", "--output", "again"]
    assert cli.main(command) == 0
    old, new = (json.loads((tmp_path / name / "results.json").read_text())["tasks"]
                for name in ("old/eval", "again"))  # fmt: skip
    assert {t: row["value"] for t, row in old.items()} == {
        t: row["value"] for t, row in new.items()
    }
    assert cli.main(["report", "old", "--output", "page"]) == 0
    assert cli.main(["compare", "old", "again"]) == 0, capsys.readouterr().err
