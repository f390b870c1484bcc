"""Wrong input of the verb ends with 2; wrong recipes are in training/refusals.json."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.upcycle.frequencies import count_table
from tests import tiny
from tests.upcycle import dense
from tests.upcycle.small import run, write_recipe

IDS = len(tiny.tokenizer())
PINNED = {"count": 3, "pinned": {f"kind{n}": n % 3 for n in range(6)}}


def test_several_ranks_end_with_2(tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "experts.processes" in err
    assert not (tmp_path / "run").exists()


def test_an_unknown_stage_or_expert_ends_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    for arguments, said in (
        (["--stage", "mrege"], "unknown stage 'mrege'; did you mean 'merge'?"),
        (["--stage", "experts", "--expert", "3"], "--expert 3: expected 0 to 2"),
        (["--expert", "0"], "with --stage experts"),
        (["--resume"], "has no upcycle"),
    ):
        code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run", *arguments)
        assert code == 2 and said in err, err


def _other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_experts_of_another_tokenizer_than_the_texts_end_with_2(tmp_path, capsys):
    dense.save("llama", tmp_path / "other", 2)
    _other_tokenizer(tmp_path / "other")
    ready = [str(tmp_path / "other")] * 3
    recipe = write_recipe(tmp_path, experts={"checkpoints": ready}, clusters=PINNED)
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "has another tokenizer than the dense model" in err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_ids_than_the_model_ends_with_2(tmp_path, capsys):
    dense.save("llama", tmp_path / "dense", 1, vocab_size=IDS - 1)
    code, err = run(capsys, "upcycle", write_recipe(tmp_path), "--output", tmp_path / "run")
    assert code == 2 and f"ids up to {IDS - 1}, but the model's vocab_size is {IDS - 1}" in err
    assert not (tmp_path / "run").exists()


def test_a_table_of_another_vocabulary_ends_with_2(finished_table, tmp_path, capsys):
    recipe = write_recipe(tmp_path, clusters={"count": 3, "table": str(finished_table)})
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "but this model has 400 tokens and 3 experts" in err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished_table(tmp_path):
    counts_CV = np.ones((3, 111), np.int64)
    count_table(counts_CV, np.arange(3), 3, "t").save(tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def test_texts_shorter_than_a_row_end_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path, texts={
        "categories": dense.write_categories(tmp_path / "texts", 3, texts=3), "max_length": 4000,
    })  # fmt: skip
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "training tokens are fewer than one row of" in err
