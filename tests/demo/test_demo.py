"""The demo in two steps: everything is there at its end, and a second one continues it."""

import hashlib
import json
import re

import pytest

from moe_finetune import cli
from moe_finetune.demo.demo import METHODS, checkpoint
from moe_finetune.recipe.yaml_tree import recipes_folder

ARGUMENTS = ["demo", "--backend", "hf", "--steps", "2", "--output"]


@pytest.fixture
def few_rows(tmp_path, monkeypatch):
    """The demo's folder with twelve rows of each file to score, and 300 to train on."""
    shipped, demo = recipes_folder() / "demo", tmp_path / "recipes" / "demo"
    demo.mkdir(parents=True)
    (demo / "checkpoint").symlink_to(shipped / "checkpoint")
    for file in shipped.glob("*.jsonl"):
        rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
        count = 12 if file.stem.endswith(("_test", "validation")) else 300
        (demo / file.name).write_text("".join(rows[:count]), encoding="utf-8")
    monkeypatch.setattr("moe_finetune.demo.demo.recipes_folder", lambda: demo.parent)
    # No engine runs; with its environment nothing would be forked.
    monkeypatch.setattr("moe_finetune.demo.demo.engines_environment", dict)


@pytest.mark.slow
def test_a_second_demo_keeps_what_is_finished(warm, few_rows, tmp_path, capsys):
    folder = tmp_path / "demo"
    assert cli.main([*ARGUMENTS, str(folder)]) == 0
    first = capsys.readouterr()
    assert "demo_arithmetic (exact_match)  12" in first.out and "next:" in first.out
    assert "Traceback" not in first.err and "{'" not in first.err
    results = [folder / method / "eval" / "results.json" for method in METHODS]
    base = folder / "base" / "results.json"
    read = [json.loads(file.read_text())["checkpoint"]["sha256"] for file in [base, *results]]
    assert len(set(read)) == 3, "three checkpoints were evaluated"
    for method in METHODS:
        beside = (folder / method / "eval_base" / "results.json").read_bytes()
        assert beside == base.read_bytes()

    def weights():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")}

    times = weights()
    assert len(times) == 4, "an adapter and a merged checkpoint of each"
    assert cli.main([*ARGUMENTS, str(folder)]) == 0
    assert weights() == times and capsys.readouterr().out == first.out


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert cli.main([*ARGUMENTS, str(tmp_path)]) == 2
    assert "contains other files; choose another --output" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_says_why(warm, few_rows, tmp_path, capsys):
    (tmp_path / "demo" / "aux_loss").mkdir(parents=True)
    (tmp_path / "demo" / "aux_loss" / "mine.txt").touch()
    (tmp_path / "demo" / "data").mkdir()
    (tmp_path / "demo" / "data" / "train.jsonl").touch()
    assert cli.main([*ARGUMENTS, str(tmp_path / "demo")]) == 2
    assert re.search("error: aux_loss: .*mine|other files", capsys.readouterr().err)


def test_the_shipped_weights_are_those_that_the_readme_names():
    digest = hashlib.sha256((checkpoint() / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (recipes_folder() / "demo" / "README.md").read_text()
