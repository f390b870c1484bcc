"""The reference of a whole model under FSDP2: all ranks have its weights, and it may move."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support import tiny
from tests.support.ranks import furthest, run_ranks
from tests.training.ranks.reference_worker import PAIRS, SAVED, STEPS, WORLD

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(warm, tmp_path_factory):
    made = tmp_path_factory.mktemp("reference")
    tiny.save("qwen3_moe", made / "base", num_hidden_layers=2)
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    run_ranks("tests.training.ranks.reference_worker", WORLD, made)
    return made


def reference(folder, name, step=STEPS):
    return load_file(folder / name / f"checkpoints/checkpoint-{step}/trainer/reference.safetensors")


def logged(folder, name, key):
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if row["kind"] == "train"]


def test_the_first_step_measures_from_the_base_itself(folder):
    """A rank that has no weights of the reference would measure from another model."""
    for name in ("sharded", "alone"):
        assert logged(folder, name, "rewards/margins")[0] == pytest.approx(0, abs=1e-5)
    assert logged(folder, "grpo", "kl") == [pytest.approx(0, abs=1e-6)]


def test_the_reference_is_that_of_one_process(folder):
    sharded, alone = (
        {step: reference(folder, name, step) for step in (SAVED, STEPS)}
        for name in ("sharded", "alone")
    )
    for step in (SAVED, STEPS):
        assert furthest(sharded[step], alone[step]) < 1e-5
    assert furthest(alone[STEPS], alone[SAVED]) > 1e-4, "it did not move"
    for key in ("loss", "rewards/margins", "grad_norm"):
        expected = pytest.approx(logged(folder, "alone", key), rel=1e-4, abs=1e-6)
        assert logged(folder, "sharded", key) == expected


def test_a_sharded_reference_is_resumed(folder):
    whole, resumed = (reference(folder, name) for name in ("sharded", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for key in ("loss", "rewards/margins"):
        assert logged(folder, "sharded", key) == logged(folder, "resumed", key)
