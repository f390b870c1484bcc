"""A run that the callback writes from two ranks, and one that was killed and resumed."""

import json

import pytest
from safetensors.torch import load_file

from moe_finetune import cli
from tests.support import tiny
from tests.support.ranks import run_ranks
from tests.training.ranks.output_worker import STEPS, train


def read(run, name):
    return json.loads((run / name).read_text())


def log_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("runtime", "per_second", "train_loss", "flos")
    return [{k: v for k, v in row.items() if not any(part in k for part in timed)} for row in rows]


@pytest.mark.slow
def test_two_ranks_and_a_resume_leave_the_same_run(warm, tmp_path, capsys):
    base = tiny.save("qwen3_moe", tmp_path / "base", num_hidden_layers=2)
    run_ranks("tests.training.ranks.output_worker", 2, base, tmp_path)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    log = log_of(whole)
    kinds = [(row["kind"], row["step"]) for row in log]
    assert [kind for kind in kinds if kind[0] == "train"] == [("train", n) for n in (1, 2, 3, 4)]
    assert kinds.count(("end", STEPS)) == 1  # one rank writes
    assert log_of(resumed) == log
    for name in ("before", "after"):
        assert read(resumed, f"routing/{name}.json") == read(whole, f"routing/{name}.json")
    steps = [(run / "routing" / "steps.jsonl").read_text() for run in (whole, resumed)]
    assert steps[0] == steps[1] and len(steps[0].splitlines()) == STEPS // 2
    adapters = [
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, resumed)
    ]
    assert adapters[0].keys() == adapters[1].keys() and adapters[0]
    assert all(adapters[1][name].equal(tensor) for name, tensor in adapters[0].items())
    noted = [
        (run / "recipe.yaml").read_text().split("share: 0.1")[1][:60] for run in (whole, resumed)
    ]
    assert noted[0] == noted[1] and "weight" in (whole / "recipe.yaml").read_text()

    # One rank with the batches of both measures the same rows before training.
    train(base, tmp_path / "c", tmp_path / "alone")
    before = read(tmp_path / "alone", "routing/before.json")
    assert before == read(whole, "routing/before.json")

    merged = tmp_path / "merged"
    assert cli.main(["merge", str(resumed), "--output", str(merged), "--verify"]) == 0
    assert "verified: " in capsys.readouterr().out
