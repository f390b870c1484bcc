"""The demo on a tiny scale: everything is there at its end, and a second one keeps it."""

import json
from contextlib import nullcontext
from functools import partial

import pytest

from moe_finetune import cli
from moe_finetune.demo import demo as module
from moe_finetune.demo.batches import Mixture
from moe_finetune.demo.data import DataSizes, write_demo_data
from moe_finetune.demo.pretrain import PretrainConfig, ensure_demo_checkpoint
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.run import run_recipe

CONFIG = PretrainConfig(
    vocab_size=320,
    hidden_size=64,
    layers=2,
    experts=6,
    top_k=4,
    expert_width=32,
    steps=2,
    mixture=Mixture(code_rows=2, prose_rows=1, arithmetic_rows=3, length=96),
)


@pytest.fixture
def small(warm, monkeypatch, tmp_path):
    """The demo with a tiny checkpoint and few rows, as the command line runs it."""
    monkeypatch.setattr(module, "engines_environment", dict)  # no engine, so the same imports
    make = partial(ensure_demo_checkpoint, tmp_path / "cache", config=CONFIG)
    monkeypatch.setattr(module, "ensure_demo_checkpoint", lambda progress: make(progress=progress))
    sizes = DataSizes(train=48, validation=12, arithmetic_test=6, cloze_test=4)
    monkeypatch.setattr(module, "write_demo_data", partial(write_demo_data, sizes=sizes))
    monkeypatch.setattr(module, "code_identity", lambda: "this code")


def test_a_demo_that_ends_before_its_first_part_goes_on(tmp_path, monkeypatch):
    folder, reached = tmp_path / "demo", []

    def stop(output, *_):
        reached.append(output)
        (output / "data").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_make", stop)
    monkeypatch.setattr(module, "Worker", lambda *_: nullcontext())  # nothing is handed over
    for _ in range(2):
        assert cli.main(["demo", "--backend", "hf", "--output", str(folder)]) == 130
    assert reached == [folder, folder], "the second was refused"


@pytest.mark.slow
def test_a_second_demo_keeps_what_has_not_changed(small, tmp_path, capsys):
    folder = tmp_path / "demo"
    arguments = ["demo", "--backend", "hf", "--steps", "2", "--output", str(folder)]
    assert cli.main(arguments) == 0
    first = capsys.readouterr()
    assert "demo_arithmetic (exact_match)  6" in first.out and "next:" in first.out
    assert "Traceback" not in first.err and "{'" not in first.err
    scores = {m: json.loads((folder / m / "eval" / "results.json").read_text())
              for m in module.METHODS}  # fmt: skip
    scores["base"] = json.loads((folder / "base" / "results.json").read_text())
    hashes = {name: results["checkpoint"]["sha256"] for name, results in scores.items()}
    assert len(set(hashes.values())) == 3, "three checkpoints were evaluated"
    for method in module.METHODS:
        beside = (folder / method / "eval_base" / "results.json").read_bytes()
        assert beside == (folder / "base" / "results.json").read_bytes()
    beside = folder / module.METHODS[1]
    single = run_recipe(load_recipe(beside / "recipe.yaml"), tmp_path / "alone", scored=False)
    weights = "adapter/adapter_model.safetensors"
    assert (single / weights).read_bytes() == (beside / weights).read_bytes()
    assert (single / "merged").is_dir() and not (single / "eval").exists()

    def files():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}

    times = files()
    assert cli.main(arguments) == 0
    second = capsys.readouterr()
    assert files() == times and second.out == first.out
    assert "report: kept, because its inputs have not changed" in second.err
