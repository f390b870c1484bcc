"""A page, the end of a run and ``compare`` name the same differences, corrected together."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.evaluation import statistics
from moe_finetune.evaluation.score import Score
from moe_finetune.report.context import Report
from moe_finetune.report.read_runs import Run, read_runs
from moe_finetune.report.sections.answer import answer_text
from moe_finetune.study.compare_evaluations import compare
from tests.support.results import write_results


def run_of(label: str, right_TN: np.ndarray) -> Run:
    """A run with a score for each row of ``right_TN``: 1 for an item that is right, else 0."""
    scores = {}
    for task, right_N in enumerate(right_TN):
        value, n = float(right_N.mean()), len(right_N)
        stderr = math.sqrt(value * (1 - value) / (n - 1))
        scores[f"t{task}"] = score = Score(value, "exact_match", stderr, n)
        keys = [("t", str(item), 0) for item in range(n)]
        score.__dict__["items"] = {k: ("p", float(v)) for k, v in zip(keys, right_N, strict=True)}
    empty = {field.name: {} for field in dataclasses.fields(Run)}
    empty |= {"routing_before": None, "routing_after": None}
    return Run(**empty | {"path": Path(label), "label": label, "scores": scores})


def named(base_TN: np.ndarray, tuned_TN: np.ndarray) -> str:
    """The sentence about scores."""
    (text,) = answer_text(Report([run_of("a", base_TN), run_of("b", tuned_TN)], "title"))
    (line,) = [line for line in text.splitlines() if line.startswith("Scores: ")]
    return line


@pytest.fixture
def quick(monkeypatch):
    """McNemar's test decides; the bootstrap would only draw the intervals."""
    monkeypatch.setattr(statistics, "paired_bootstrap", lambda values, rng: (-1.0, 1.0, 1.0))


def test_ten_tasks_of_chance_are_seldom_named(quick):
    """At 5 % and its sampling error: 10 expected, at most 16 of 200."""
    pages = 0
    for seed in range(200):
        right_RTN = np.random.default_rng(seed).random((2, 10, 200)) < 0.5
        line = named(*right_RTN)
        pages += "better" in line or "worse" in line
    assert 0 < pages <= 16


def test_a_task_that_is_better_among_nine_of_chance_is_named(quick):
    """400 items, 50 and 65 % right: Holm finds 93 of 100."""
    pages = 0
    for seed in range(200):
        draw_RTN = np.random.default_rng(seed).random((2, 10, 400))
        base_TN, tuned_TN = draw_RTN[0] < 0.5, draw_RTN[1] < 0.5
        tuned_TN[3] = draw_RTN[1, 3] < 0.65
        pages += "better on t3 " in named(base_TN, tuned_TN)
    assert pages >= 170


def test_compare_and_the_page_agree(tmp_path):
    """Ten tasks of chance of which two would be named if each were tested alone."""
    right_RTN = np.random.default_rng(92).random((2, 10, 200)) < 0.5
    folders = []
    for name, right_TN in zip("ab", right_RTN, strict=True):
        tasks = {f"t{task}": [float(v) for v in right_N] for task, right_N in enumerate(right_TN)}
        write_results(tmp_path / name / "eval", tasks, metric="exact_match")
        folders.append(tmp_path / name)
    _, table = compare([folder / "eval" for folder in folders])
    tests = {column.name: test for _, column, _, test in table.tests}
    assert sum(test.p < 0.05 for test in tests.values()) == 2
    report = Report(read_runs(folders), "title")
    differences = report.against_baseline(report.runs[1])
    assert {task: test.verdict for task, test in tests.items()} == {
        task: difference.verdict for task, difference in differences.items()
    }
    assert "no clear difference on 10 benchmarks" in answer_text(report)[0]
