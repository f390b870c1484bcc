import contextlib
import json
import math
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
import yaml

from moe_finetune.errors import (
    CheckpointError,
    DataError,
    EvaluationError,
    OutputExistsError,
)
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.reply_cache import ReplyStore
from moe_finetune.evaluation.results import load_results, load_samples
from moe_finetune.io.hashes import checkpoint_hash
from moe_finetune.io.row_files import read_rows
from tests.evaluation.local import write_suite
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def backend(checkpoint):
    with open_backend(checkpoint, "hf") as opened:
        yield opened


@pytest.fixture(scope="module")
def finished(backend, checkpoint, suite, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    evaluate(checkpoint, suite, "hf", output, opened=backend, progress=False)
    return output


def _samples(folder):
    results = load_results(folder)
    return {name: load_samples(folder, task) for name, task in results["tasks"].items()}


def test_results_hold_everything_that_a_reader_needs(finished, checkpoint):
    results = load_results(finished)
    assert results["complete"] and results["unfinished"] == []
    assert results["checkpoint"]["sha256"] == checkpoint_hash(checkpoint)
    assert results["environment"]["packages"]["lm-eval"] == "0.4.13"
    sums, colours = results["tasks"]["sums"], results["tasks"]["colours"]
    assert (sums["n"], sums["shots"], sums["version"]) == (23, 2, 1.0)
    assert (colours["n"], colours["chance"]) == (27, 1 / 3)
    assert colours["usage"]["requests"] == 81
    assert sums["usage"]["tokens_per_second"] > 0
    assert set(colours["metrics"]) == {"acc,none", "acc_norm,none"}


def test_scores_are_the_mean_of_the_samples(finished):
    results, samples = load_results(finished), _samples(finished)
    for name, metric in (("sums", "exact_match"), ("colours", "acc")):
        values = [row["metrics"][metric] for row in samples[name]]
        mean = sum(values) / len(values)
        assert results["tasks"][name]["value"] == pytest.approx(mean)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        assert results["tasks"][name]["stderr"] == pytest.approx(spread / math.sqrt(len(values)))
    assert len({row["item"] for row in samples["colours"]}) > 15


def test_log_likelihoods_are_the_models(finished, checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for row in _samples(finished)["colours"][:3]:
        for (context, text), ((logprob, _),) in zip(row["prompts"], row["replies"], strict=True):
            ids = tokenizer(context + text, return_tensors="pt").input_ids
            start = len(tokenizer(context).input_ids)
            with torch.no_grad():
                table = model(ids).logits[0].float().log_softmax(-1)
            expected = sum(table[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))
            assert logprob == pytest.approx(expected, abs=1e-4)


def test_examples_come_from_the_training_split(finished, suite):
    train = {r["question"] for r in read_rows(suite.parent / "sums_train.jsonl")}
    prompt = _samples(finished)["sums"][0]["prompts"][0][0]
    lines = [line for line in prompt.split("\n") if line]
    assert len(lines) == 3
    assert all(line.split("=")[0] + "=" in train for line in lines[:2])


def test_a_second_call_asks_nothing(backend, checkpoint, suite, finished, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("the model was asked")

    monkeypatch.setattr(backend.lm, "generate_until", forbidden)
    monkeypatch.setattr(backend.lm, "loglikelihood", forbidden)
    before = load_results(finished)["tasks"]
    again = evaluate(checkpoint, suite, "hf", finished, opened=backend, progress=False)
    assert json.loads(json.dumps(again["tasks"])) == before


def test_another_checkpoint_never_meets_stored_replies(checkpoint, suite, finished, tmp_path):
    other = tiny.save("qwen3_moe", tmp_path / "other", seed=5)
    with pytest.raises(OutputExistsError, match="another checkpoint"):
        evaluate(other, suite, "hf", finished, progress=False)
    output = tmp_path / "output"
    shutil.copytree(finished, output)
    (output / "results.json").unlink()
    mixed = evaluate(other, suite, "hf", output, progress=False)
    fresh = evaluate(other, suite, "hf", tmp_path / "fresh", progress=False)
    assert all(task["usage"]["stored"] == 0 for task in mixed["tasks"].values())
    assert _samples(output) == _samples(tmp_path / "fresh")
    assert _samples(output)["colours"] != _samples(finished)["colours"]
    assert mixed["checkpoint"]["sha256"] == fresh["checkpoint"]["sha256"]


def test_a_changed_weight_file_is_another_checkpoint(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert checkpoint_hash(copy) == checkpoint_hash(checkpoint)
    (copy / "README.md").write_text("notes")
    assert checkpoint_hash(copy) == checkpoint_hash(checkpoint)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoint_hash(copy) != checkpoint_hash(checkpoint)


def test_stopped_again_and_again_gives_the_same_items(backend, checkpoint, tmp_path, monkeypatch):
    """Each chunk is on the disk before the next one is asked for, where a kill cannot undo it."""
    suite, add, sizes = write_suite(tmp_path / "data", items=31), ReplyStore.add, []
    monkeypatch.setattr(backend, "chunk", 4)

    def add_and_stop(store, replies):
        add(store, replies)
        with contextlib.closing(sqlite3.connect(store.path)) as other:
            sizes.extend(other.execute("SELECT count(*) FROM replies").fetchone())
        raise KeyboardInterrupt

    def score(folder):
        evaluate(checkpoint, suite, "hf", tmp_path / folder, opened=backend, progress=False)

    with monkeypatch.context() as patched:
        patched.setattr(ReplyStore, "add", add_and_stop)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                score("stopped")
    assert sizes == sorted(set(sizes)) and sizes[0] > 0
    score("stopped")
    score("whole")
    assert _samples(tmp_path / "stopped") == _samples(tmp_path / "whole")
    stopped, whole = (load_results(tmp_path / name)["tasks"] for name in ("stopped", "whole"))
    assert all(task["metrics"] == whole[name]["metrics"] for name, task in stopped.items())


def test_prompts_that_do_not_fit_are_an_error_that_keeps_finished_tasks(backend, suite, tmp_path):
    content = yaml.safe_load(suite.read_text())
    content["tasks"].reverse()
    content["tasks"][1]["max_tokens"] = 2040
    path = suite.parent / "long.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(EvaluationError, match=r"sums: 23 of 23 prompts .* context of 2048 tokens"):
        evaluate("unused", path, "hf", tmp_path, opened=backend, progress=False)
    results = load_results(tmp_path)
    assert not results["complete"]
    assert list(results["tasks"]) == ["colours"] and results["unfinished"] == ["sums"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"template": "local_exact"}, EvaluationError, "did you mean 'local_exact_match'"),
        ({"version": 9.0}, EvaluationError, "has version 1.0 here, but the suite needs 9.0"),
        ({"shots": 0, "files": {"test": "none.jsonl"}}, DataError, "none.jsonl does not exist"),
    ],
)
def test_a_task_that_cannot_be_found_is_named(backend, suite, tmp_path, change, error, message):
    task = yaml.safe_load(suite.read_text())["tasks"][0] | change
    path = suite.parent / "bad.yaml"
    path.write_text(yaml.safe_dump({"name": "bad", "tasks": [task]}))
    with pytest.raises(error, match=message):
        evaluate("unused", path, "hf", tmp_path / "out", opened=backend, progress=False)
    assert not (tmp_path / "out").exists()


def test_bad_checkpoints_and_backends(suite, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such folder"):
        evaluate(tmp_path / "nowhere", suite, "hf", tmp_path / "o")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError,
        match="nobody/nothing: neither a local folder nor a model on the",
    ):
        evaluate("nobody/nothing", suite, "hf", tmp_path / "o")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        evaluate(tmp_path / "empty", suite, "hf", tmp_path / "o")
    with pytest.raises(EvaluationError, match="unknown backend 'vlm'; did you mean 'vllm'"):
        evaluate(tmp_path, suite, "vlm", tmp_path / "o")
    with pytest.raises(EvaluationError, match="unknown suite 'paper9'; did you mean 'paper"):
        evaluate(tmp_path, "paper9", "hf", tmp_path / "o")
    with pytest.raises(EvaluationError, match=r"no server answers at http://127\.0\.0\.1:9/v1/m"):
        evaluate(tmp_path, suite, "server", tmp_path / "o", base_url="http://127.0.0.1:9/v1")
    assert not (tmp_path / "o").exists()


def test_gsm8k_and_human_eval_run_from_real_files(backend, data_folder, tmp_path):
    """Real prompts and real scoring; the answers of a random model are wrong."""
    results = evaluate(
        "unused", "gsm8k", "hf", tmp_path / "g", data_folder, limit=2, opened=backend,
        overflow="truncate", progress=False,
    )  # fmt: skip
    task = results["tasks"]["gsm8k"]
    assert (task["n"], task["value"], task["usage"]["overflowing"]) == (2, 0.0, 2)
    assert any("were longer than the context" in note for note in task["notes"])
    row = load_samples(tmp_path / "g", task)[0]
    assert row["prompts"][0][0].count("Question: ") == 6
