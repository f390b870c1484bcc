import json

import numpy as np
import pytest

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.score import Score, compare_scores
from moe_finetune.io import write_atomic
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.report.score_differences import difference
from moe_finetune.study.compare_evaluations import compare
from moe_finetune.study.page import comparison_page
from moe_finetune.study.render import comparison_text
from tests.support.results import write_results as write


def by_task(*folders, names=None):
    """Tests by task, of the second folder against the first."""
    _, table = compare(folders, names)
    return {column.name: test for _, column, _, test in table.tests}


def test_wins_ties_and_losses(tmp_path):
    a = write(tmp_path / "a", {"up": [0, 0, 0, 1] * 25, "same": [0, 1] * 30, "down": [1] * 30})
    b = write(
        tmp_path / "b",
        {"up": [1, 1, 0, 1] * 25, "same": [1, 0] + [0, 1] * 29, "down": [0] * 12 + [1] * 18},
    )
    study, table = compare([a, b])
    tests = {column.name: test for _, column, _, test in table.tests}
    assert {name: test.verdict for name, test in tests.items()} == {
        "up": "better", "same": "unclear", "down": "worse",
    }  # fmt: skip
    assert tests["up"].name == "McNemar" and tests["up"].p == pytest.approx(2 * 0.5**50)
    assert tests["up"].difference == pytest.approx(0.5)
    assert tests["up"].low < 0.5 < tests["up"].high
    assert tests["same"].p == 1.0
    assert table.gains["b"] == pytest.approx((0.75 / 0.25 + 0.5 / 0.5 + 0.6 / 1.0) / 3 - 1)
    text = comparison_text(table)
    assert comparison_text(compare([a, b])[1]) == text
    assert "1 better, 1 without a clear difference, 1 worse" in text
    assert [line.split()[1:6] for line in text.splitlines()[1:4]] == [
        ["up", "100", "25.00", "75.00", "+50.00"], ["same", "60", "50.00", "50.00", "+0.00"],
        ["down", "30", "100.00", "60.00", "-40.00"],
    ]  # fmt: skip
    page = comparison_page(study, table)
    assert "Benchmark or metric" in page and "P (Holm)" in page
    assert "+50.00" in page and "McNemar" in page and "Content-Security-Policy" in page


def test_holm_over_all_results_and_tasks(tmp_path):
    """As in a study of one seed: two arms and two tasks are one family of four."""
    n = 30
    base = write(tmp_path / "base", {"x": [0] * n, "y": [0] * n})
    arms = [write(tmp_path / name, {"x": [1] * n, "y": [0] * n}) for name in "ab"]
    _, table = compare([base, *arms])
    found = {(row.label, column.name): test for (_, row), column, _, test in table.tests}
    assert found["a", "x"].p == pytest.approx(2 * 0.5**n)
    assert found["a", "x"].p_holm == found["b", "x"].p_holm == pytest.approx(4 * 2 * 0.5**n)


@pytest.mark.parametrize("metric", ["word_perplexity", "brier_score", "error_rate"])
def test_lower_is_better_in_the_verb_on_the_page_and_in_the_study(tmp_path, metric):
    """100 paired items, one lower each: better, whoever compares."""
    values = np.random.default_rng(5).uniform(9, 12, 100)
    a = write(tmp_path / "a", {"t": [*values]}, metric=metric)
    b = write(tmp_path / "b", {"t": [*values - 1]}, metric=metric)
    _, table = compare([a, b])
    assert by_task(a, b)["t"].verdict == "better"
    assert table.gains["b"] == pytest.approx(values.mean() / (values.mean() - 1) - 1)
    scores = [
        Score.parse(json.loads((f / "results.json").read_text())["tasks"]["t"], f) for f in (a, b)
    ]
    assert difference(*scores).verdict == "better" and difference(*scores).paired
    declared = write(tmp_path / "c", {"t": [*values - 1]}, metric=metric, higher_is_better=True)
    back = write(tmp_path / "d", {"t": [*values]}, metric=metric, higher_is_better=True)
    assert by_task(declared, back)["t"].verdict == "better"


def test_the_headline_filter_is_the_one_that_is_compared(tmp_path):
    # The samples' other filter holds zeros; using it would make every task a tie.
    a = write(tmp_path / "a", {"t": [0] * 20})
    b = write(tmp_path / "b", {"t": [1] * 20})
    assert by_task(a, b)["t"].verdict == "better"


def test_fractions_use_the_bootstrap(tmp_path):
    base = np.random.default_rng(0).uniform(0, 1, 80)
    a = write(tmp_path / "a", {"t": [*base]})
    b = write(tmp_path / "b", {"t": [*base + 0.2]})
    test = by_task(a, b, names=["base", "method"])["t"]
    assert test.name == "bootstrap" and test.verdict == "better"
    assert test.difference == pytest.approx(0.2)


def test_other_prompts_or_items_are_refused(tmp_path):
    a = write(tmp_path / "a", {"t": [0, 1, 1]})
    with pytest.raises(EvaluationError, match="3 of 3 prompts differ"):
        compare([a, write(tmp_path / "b", {"t": [0, 1, 1]}, prompts="other")])
    # The remedy named shots, template and seed, but not what init's chats need.
    chat, plain = (
        write(tmp_path / name, {"t": [0, 1, 1]}, prompts=name, chat=name == "chat", shots=5)
        for name in ("chat", "plain")
    )
    with pytest.raises(EvaluationError, match=r"3 prompts differ \(chat is true and false\); "):
        compare([chat, plain])
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
    (note,) = compare(folders)[1].notes
    assert "a by hf in float32, b by vllm in bfloat16; part of a difference" in note
    assert compare([folders[0], folders[0]])[1].notes == []


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
    with pytest.raises(
        EvaluationError, match=r"at .*run/eval/results\.json; .*eval .*run --suite NAME.*run/eval"
    ):
        compare([tmp_path / "run", tmp_path / "run"])
