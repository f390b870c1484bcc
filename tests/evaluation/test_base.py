"""The model before training is scored once, and beside each run that started from it."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune import cli
from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation import base_scores as module
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.run import evaluate_base
from tests.evaluation.local import write_suite


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """The checkpoints that were scored as a base."""
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "cache"))
    folders, evaluate = [], module.evaluate

    def counted(checkpoint, *args, **kwargs):
        folders.append(checkpoint)
        return evaluate(checkpoint, *args, **kwargs)

    monkeypatch.setattr(module, "evaluate", counted)
    return folders


def test_two_runs_share_the_scores_of_their_base(evaluated, tiny_checkpoint, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"{n} and {n * n}"} for n in range(8)])
    suite = write_suite(tmp_path / "suite", items=4, shots=0)
    items = [
        f"model.path={tiny_checkpoint('qwen3_moe')}", "model.dtype=float32",
        f"data.train={tmp_path / 'rows.jsonl'}", "lora={rank: 2, targets: [attention]}",
        "trainer={max_steps: 1, per_device_train_batch_size: 2, report_to: none}",
        f"evaluation={{suite: {suite}, backend: hf, limit: 3}}", "method=none",
    ]  # fmt: skip
    for seed in (1, 2):
        command = ["train", *items, f"trainer.seed={seed}", "-o", str(tmp_path / f"run{seed}")]
        assert cli.main(command) == 0, capsys.readouterr().err
        run = RunFolder(tmp_path / f"run{seed}")
        before, after = (json.loads(f.read_text()) for f in (run.base_results, run.results))
        assert before["suite"] == after["suite"] and before["tasks"].keys() == after["tasks"].keys()
        assert before["checkpoint"]["sha256"] != after["checkpoint"]["sha256"]
        assert all((run.base_evaluation / t["samples"]).is_file() for t in before["tasks"].values())
        # The ending shows before and after.
        assert re.search(r"^scores +n +base +after$", capsys.readouterr().out, re.M)
    assert len(evaluated) == 1
    assert cli.main([*command, "--resume"]) == 0 and len(evaluated) == 1
    command = ["train", *items, "evaluation.base=false", "-o", str(tmp_path / "without")]
    assert cli.main(command) == 0 and len(evaluated) == 1
    assert not RunFolder(tmp_path / "without").base_evaluation.exists()
    assert cli.main([*command[:-2], "--dry-run", "-o", str(tmp_path / "no")]) == 0
    assert "the base" not in capsys.readouterr().out


def test_other_weights_limits_and_rows_are_scored_again(evaluated, tiny_checkpoint, tmp_path):
    base = shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "base")
    suite = write_suite(tmp_path / "suite", items=4, shots=0)

    def score(limit=2):
        module.score_base(base, str(suite), tmp_path / "out", backend="hf", vllm={}, limit=limit)
        return len(evaluated)

    assert (score(), score(), score(limit=3), score(limit=3)) == (1, 1, 2, 2)
    file = tmp_path / "suite" / "sums_test.jsonl"
    file.write_text(file.read_text().replace('"question": "', '"question": "0+'))
    assert (score(), score()) == (3, 3)
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = torch.flip(weights["lm_head.weight"], [0])
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert (score(), score()) == (4, 4)


def test_a_base_that_cannot_be_scored_is_a_warning(evaluated, monkeypatch, tmp_path, capsys):
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text("model: {path: m}\ndata: {train: a.jsonl}\nevaluation: {suite: demo}\n")
    run = RunFolder(tmp_path / "run")
    run.evaluation.mkdir(parents=True)
    run.results.write_text(json.dumps({"schema": 1, "tasks": {}, "wall_seconds": 75.0}))

    def fail(*_, **__):
        raise EvaluationError("it does not fit")

    monkeypatch.setattr(
        "moe_finetune.training.run.checkpoint_and_rows.base_folder", lambda recipe: tmp_path
    )
    monkeypatch.setattr(module, "score_base", fail)
    evaluate_base(load_recipe(recipe_file), run)
    said = capsys.readouterr().err
    assert "the trained model took 1:15" in said
    assert "the base was not scored: it does not fit (evaluation.base: false" in said
