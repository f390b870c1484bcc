import json

import numpy as np
import pytest

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.comparison import compare
from moe_finetune.evaluation.score import Score, compare_scores
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import to_json
from moe_finetune.io.rows import write_jsonl
from moe_finetune.report.compare import difference
from moe_finetune.report.page import comparison_page


def write(folder, tasks, prompts="same", complete=True, metric="acc", **declared):
    """Write results as the engine does: label -> list of item values."""
    entries = {}
    for name, values in tasks.items():
        rows = [
            {
                "task": name, "doc_id": i, "item": f"{name}-{i // 2}", "filter": f,
                "prompt_sha256": f"{prompts}-{i}", "metrics": {metric: v if f == "good" else 0.0},
                "replies": [["x"]],
            }
            for i, v in enumerate(values)
            for f in ("bad", "good")
        ]  # fmt: skip
        write_jsonl(folder / f"{name}.jsonl", rows)
        entries[name] = {
            "task": name, "metric": metric, "filter": "good", "n": len(values),
            "value": float(np.mean(values)), "samples": f"{name}.jsonl", **declared,
        }  # fmt: skip
    results = {"schema": 1, "complete": complete, "unfinished": [], "tasks": entries}
    write_atomic(folder / "results.json", to_json(results, sort=False))
    return folder


def test_wins_ties_and_losses(tmp_path):
    a = write(tmp_path / "a", {"up": [0, 0, 0, 1] * 25, "same": [0, 1] * 30, "down": [1] * 30})
    b = write(
        tmp_path / "b",
        {"up": [1, 1, 0, 1] * 25, "same": [1, 0] + [0, 1] * 29, "down": [0] * 12 + [1] * 18},
    )
    result = compare([a, b])
    rows = {row.task: row for row in result.rows}
    assert {name: row.test.verdict for name, row in rows.items()} == {
        "up": "better", "same": "unclear", "down": "worse",
    }  # fmt: skip
    assert rows["up"].test.name == "McNemar" and rows["up"].test.p == pytest.approx(2 * 0.5**50)
    assert rows["up"].test.difference == pytest.approx(0.5)
    assert rows["up"].test.low < 0.5 < rows["up"].test.high
    assert rows["same"].test.p == 1.0
    assert result.counts == {"b": {"better": 1, "unclear": 1, "worse": 1}}
    assert result.gains["b"] == pytest.approx((0.75 / 0.25 + 0.5 / 0.5 + 0.6 / 1.0) / 3 - 1)
    again = compare([a, b])
    assert again.to_json() == result.to_json()
    assert json.loads(result.to_json())["rows"][0]["task"] == "up"
    assert "1 better, 1 without a clear difference, 1 worse" in result.to_text()
    page = comparison_page(result)
    assert '<th scope="row">up</th>' in page and "Content-Security-Policy" in page


@pytest.mark.parametrize("metric", ["word_perplexity", "brier_score", "error_rate"])
def test_lower_is_better_in_the_verb_on_the_page_and_in_the_study(tmp_path, metric):
    """100 paired items, one lower each: better, whoever compares."""
    values = np.random.default_rng(5).uniform(9, 12, 100)
    a = write(tmp_path / "a", {"t": [*values]}, metric=metric)
    b = write(tmp_path / "b", {"t": [*values - 1]}, metric=metric)
    comparison = compare([a, b])
    assert comparison.rows[0].test.verdict == "better"
    assert comparison.gains["b"] == pytest.approx(values.mean() / (values.mean() - 1) - 1)
    scores = [
        Score.parse(json.loads((f / "results.json").read_text())["tasks"]["t"], f) for f in (a, b)
    ]
    assert difference(*scores).verdict == "better" and difference(*scores).paired
    declared = write(tmp_path / "c", {"t": [*values - 1]}, metric=metric, higher_is_better=True)
    back = write(tmp_path / "d", {"t": [*values]}, metric=metric, higher_is_better=True)
    assert compare([declared, back]).rows[0].test.verdict == "better"


def test_the_headline_filter_is_the_one_that_is_compared(tmp_path):
    # The samples' other filter holds zeros; using it would make every task a tie.
    a = write(tmp_path / "a", {"t": [0] * 20})
    b = write(tmp_path / "b", {"t": [1] * 20})
    assert compare([a, b]).rows[0].test.verdict == "better"


def test_fractions_use_the_bootstrap(tmp_path):
    base = np.random.default_rng(0).uniform(0, 1, 80)
    a = write(tmp_path / "a", {"t": [*base]})
    b = write(tmp_path / "b", {"t": [*base + 0.2]})
    row = compare([a, b], ["base", "method"]).rows[0]
    assert row.test.name == "bootstrap" and row.test.verdict == "better"
    assert row.test.difference == pytest.approx(0.2)


def test_other_prompts_or_items_are_refused(tmp_path):
    a = write(tmp_path / "a", {"t": [0, 1, 1]})
    with pytest.raises(EvaluationError, match="3 of 3 prompts differ"):
        compare([a, write(tmp_path / "b", {"t": [0, 1, 1]}, prompts="other")])
    with pytest.raises(EvaluationError, match=r"other items \(3 and 4, 3 in common\)"):
        compare([a, write(tmp_path / "c", {"t": [0, 1, 1, 0]})])
    with pytest.raises(EvaluationError, match="no task in common"):
        compare([a, write(tmp_path / "d", {"u": [0, 1, 1]})])
    with pytest.raises(EvaluationError, match="at least two"):
        compare([a])
    with pytest.raises(EvaluationError, match="no results at"):
        compare([a, tmp_path / "nowhere"])


@pytest.mark.parametrize(
    "other", [{"metric": "exact_match"}, {"higher_is_better": False}], ids=["name", "direction"]
)
def test_different_metrics_are_not_compared(tmp_path, other):
    tasks = {"t": [0, 1, 1, 0, 1]}
    folders = [write(tmp_path / "a", tasks), write(tmp_path / "b", tasks, **other)]
    with pytest.raises(EvaluationError, match=r"task t: the results are of different metrics"):
        compare(folders)
    scores = [
        Score.parse(json.loads((folder / "results.json").read_text())["tasks"]["t"])
        for folder in folders
    ]
    assert compare_scores(scores[:1], scores[1:]).verdict == "unknown"


def test_other_backends_and_formats_are_noted(tmp_path):
    folders = []
    for name, backend, dtype in (("a", "hf", "float32"), ("b", "vllm", "bfloat16")):
        folder = write(tmp_path / name, {"t": [0, 1] * 9})
        content = json.loads((folder / "results.json").read_text())
        settings = {"engine": {"dtype": dtype}} if backend == "vllm" else {"dtype": dtype}
        content |= {"backend": backend, "settings": settings}
        write_atomic(folder / "results.json", json.dumps(content))
        folders.append(folder)
    (note,) = compare(folders).notes
    assert "a by hf in float32, b by vllm in bfloat16; part of a difference" in note
    assert compare([folders[0], folders[0]]).notes == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metric": ["acc"]}, r"b/results\.json: tasks\.t\.metric: .* string"),
        ({"filter": {}}, r"tasks\.t\.filter: "),
        ({"value": None}, "a and b have no task in common"),
        ({"value": "0.5"}, r"tasks\.t\.value: .* number"),
        ({"value": ...}, r"tasks\.t\.value: Field required"),
        ({"samples": 7}, r"tasks\.t\.samples: "),
    ],
)
def test_damaged_results_are_named(tmp_path, change, said):
    a, b = (write(tmp_path / name, {"t": [0, 1] * 9}) for name in "ab")
    content = json.loads((b / "results.json").read_text())
    content["tasks"]["t"] |= change
    content["tasks"]["t"] = {k: v for k, v in content["tasks"]["t"].items() if v is not ...}
    write_atomic(b / "results.json", json.dumps(content))
    with pytest.raises(EvaluationError, match=said):
        compare([a, b])


@pytest.mark.parametrize("key", ["task", "item", "filter", "prompt_sha256", "metrics"])
def test_a_damaged_row_of_samples_is_named(tmp_path, key):
    a, b = (write(tmp_path / name, {"t": [0, 1] * 9}) for name in "ab")
    rows = [json.loads(line) for line in (b / "t.jsonl").read_text().splitlines()]
    for value in (..., [key]):
        rows[3].pop(key, None)
        rows[3] |= {} if value is ... else {key: value}
        write_jsonl(b / "t.jsonl", rows)
        with pytest.raises(EvaluationError, match=r"b/t\.jsonl:4: a row needs 'metrics' and"):
            compare([a, b])


def test_a_run_without_scores_is_told_how_to_get_them(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("model: {path: m}")
    with pytest.raises(EvaluationError, match=r"moe-finetune eval .*run --suite NAME.*run/eval"):
        compare([tmp_path / "run", tmp_path / "run"])
