"""Scores in the model card of a merged checkpoint, read back with the hub's own reader."""

import json

import pytest
from huggingface_hub import ModelCard

from moe_finetune.checkpoint.small_files import write_card
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.report.card import TITLE, add_scores


def task(value, metric="exact_match", n=250):
    return {"value": value, "metric": metric, "stderr": 0.02, "n": n}


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "law")
    for folder in (run.merged, run.evaluation, run.base_evaluation):
        folder.mkdir(parents=True)
    write_card(run.merged, "Qwen/Qwen3-30B-A3B", method="erc", data=["openai/gsm8k"])
    tuned = {"gsm8k": task(0.61), "wiki": task(9.25, "perplexity", 40), "new": task(0.3)}
    base = {"gsm8k": task(0.52), "wiki": task(9.5, "perplexity", 40)}
    for file, tasks in ((run.results, tuned), (run.base_results, base)):
        file.write_text(json.dumps({"tasks": tasks}))
    return run


def test_the_hub_reads_both_scores(run):
    before = ModelCard.load(run.merged / "README.md")
    add_scores(run)
    card = ModelCard.load(run.merged / "README.md")
    found = {(r.dataset_name, r.metric_name): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("gsm8k", "exact_match"): 0.61,
        ("gsm8k", "exact_match of the base"): 0.52,
        ("wiki", "perplexity"): 9.25,
        ("wiki", "perplexity of the base"): 9.5,
        ("new", "exact_match"): 0.3,
    }
    assert card.data.model_name == "law"
    for key in ("base_model", "datasets", "library_name", "pipeline_tag", "tags"):
        assert getattr(card.data, key) == getattr(before.data, key), key
    assert card.text.startswith(before.text.rstrip())
    row = next(line for line in card.text.splitlines() if "gsm8k (" in line)
    assert "| 250 | 52.0 % | 61.0 % | +9.0 pp [" in row
    assert "| new (exact_match) | 250 | not scored | 30.0 % |  |" in card.text


def test_scores_are_replaced_not_repeated(run):
    add_scores(run)
    first = (run.merged / "README.md").read_text()
    add_scores(run)
    assert (run.merged / "README.md").read_text() == first and first.count(TITLE) == 1
    run.results.write_text(json.dumps({"tasks": {"gsm8k": task(0.7)}}))
    add_scores(run)
    text = (run.merged / "README.md").read_text()
    assert "70.0 %" in text and "61.0 %" not in text and "wiki" not in text


def test_nothing_to_write_leaves_the_card(run):
    run.results.unlink()
    before = (run.merged / "README.md").read_text()
    add_scores(run)
    assert (run.merged / "README.md").read_text() == before
    run.results.write_text(json.dumps({"tasks": {"gsm8k": task(0.7)}}))
    (run.merged / "README.md").unlink()
    add_scores(run)
    assert not (run.merged / "README.md").exists()
