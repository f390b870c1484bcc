"""Wrong input of the verb: exit code 2, one message, nothing written."""

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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["clusters.count=7"], "6 categories are fewer than the 7 clusters"),
        (["clusters.cuont=2"], "clusters.cuont: unknown key; did you mean 'count'?"),
        (
            ["clusters.pinned.kid1=0"],
            "clusters.pinned.kid1: no such category; did you mean 'kind1'?",
        ),
        (["clusters.pinned.kind1=3"], "clusters are 0 to 2"),
        (
            [f"clusters.pinned.kind{n}=1" for n in range(3)],
            "cluster 1 gets 3 categories, but clusters take 2 to 2",
        ),
        (["clusters.sizes=[3,4]"], "6 categories cannot be put into 3 clusters of 3 to 4"),
        (
            ["arms={a: {start: merged, expert_steps: true}}"],
            "expert_steps: only valid with start: dense, because the experts of 'merged'",
        ),
        (["merge.top_k=4"], "merge.top_k: 4 is more than the 3 experts"),
        (["experts.checkpoints=[a]"], "experts.checkpoints: has 1 checkpoints for 3"),
        (
            ["experts.checkpoints=[a,b,c]", "clusters.pinned.kind0=1"],
            "'kind1' is not pinned, and newly computed clusters may differ",
        ),
        (
            ["experts.lora={rank: 2, targets: [attention]}"],
            "experts.lora.targets: ['attention'] leaves out the feed-forwards",
        ),
        (
            ["experts.lora={rank: 2, targets: [experts, shared_experts]}"],
            "experts.lora.targets: these models have no shared_experts",
        ),
        (
            ["experts.lora={rank: 2, experts: chosen.json}"],
            "experts.lora.experts: a dense model has no experts to choose from",
        ),
        (
            ["finetune.lora={rank: 2, experts: chosen.json}"],
            "finetune.lora.experts: a dense model has no experts to choose from; leave it out, or",
        ),
        (
            ["finetune.lora={rank: 2, targets: []}"],
            "finetune.lora.targets: [] adapts nothing of a dense model",
        ),
        (["evaluation.passage_layer=3"], "evaluation.passage_layer: 3; the model has 3 layers"),
        (["experts.trainer.max_step=3"], "experts.trainer.max_step: unknown key"),
        (["experts.trainer.seed=3"], "experts.trainer.seed: cannot be set here: set `seeds`"),
        (["dense.path=null"], "a small Llama pretrained here"),
        (["texts.corpus=python"], "texts: set either `categories`"),
        (["seeds=[1,1]"], "seeds: give at least one number, each only once"),
        (["arms.one={start: dense, method: erc}"], "an arm that starts from 'dense' has no router"),
        (["arms.one.start=nowhere"], "arms.one.start: must be 'dense'"),
        (["arms.one two.start=dense"], "an arm's name is a folder, so it may contain only"),
        (["texts.categories.kind0=./nowhere.jsonl"], "no data file or folder"),
        (["dense.path=./nowhere"], "nowhere: no such folder"),
    ],
)
def test_a_wrong_recipe_ends_with_2(tmp_path, monkeypatch, capsys, overrides, said):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "given")
    code, err = run(capsys, "upcycle", recipe, *overrides, "--output", tmp_path / "run")
    assert code == 2 and said in err, err
    assert "Traceback" not in err and not (tmp_path / "run").exists()


def test_missing_questions_and_several_ranks_end_with_2(tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    ask = f"evaluation.judgement.file={tmp_path / 'gone.jsonl'}"
    code, err = run(capsys, "upcycle", recipe, ask, "--output", tmp_path / "run")
    assert code == 2 and "gone.jsonl" in err
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
