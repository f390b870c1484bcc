"""Differences of scores and their intervals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.evaluation.score import Score
from moe_finetune.evaluation.statistics import paired_bootstrap
from moe_finetune.report.score_differences import SIGNS, difference, score_text, verdict_mark


def _share(value: float, n: int) -> Score:
    return Score(value, "exact_match", math.sqrt(value * (1 - value) / (n - 1)), n)


def test_newcombe_interval_equals_the_published_one():
    # Newcombe 1998, table II: 56/70 against 48/80, method 10: 0.0524 to 0.3339
    delta = difference(_share(48 / 80, 80), _share(56 / 70, 70))
    assert delta.value == pytest.approx(0.2)
    assert (delta.low, delta.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert delta.verdict == "better"


def test_newcombe_interval_at_the_edge():
    # Newcombe 1998, table II: 10/10 against 0/10, method 10: 0.6075 to 1
    delta = difference(_share(0.0, 10), _share(1.0, 10))
    assert (delta.low, delta.high) == pytest.approx((0.6075, 1.0), abs=5e-5)
    same = difference(_share(1.0, 50), _share(1.0, 50))
    assert same.low < 0 < same.high
    assert same.verdict == "unclear"


def test_normal_interval_of_other_metrics():
    delta = difference(Score(14.2, "perplexity", 0.3), Score(12.0, "perplexity", 0.4))
    half = 1.959964 * 0.5
    assert (delta.low, delta.high) == pytest.approx((-2.2 - half, -2.2 + half))


@pytest.mark.parametrize(
    ("metric", "higher", "base", "run", "verdict"),
    [
        ("perplexity", None, 14.0, 12.0, "better"),
        ("perplexity", None, 12.0, 14.0, "worse"),
        ("eval_loss", None, 3.0, 2.0, "better"),
        ("bleu", None, 14.0, 12.0, "worse"),
        ("something", False, 14.0, 12.0, "better"),
        ("bleu", None, 12.0, 12.1, "unclear"),
        ("word_perplexity", None, 14.0, 12.0, "better"),
        ("brier_score", None, 14.0, 12.0, "better"),
        ("error_rate", None, 12.0, 14.0, "worse"),
        ("bits_per_byte", True, 12.0, 14.0, "better"),  # the declaration wins
    ],
)
def test_verdict_knows_which_way_is_better(metric, higher, base, run, verdict):
    task = {"metric": metric, "stderr": 0.1, "higher_is_better": higher}
    scores = [Score.parse({**task, "value": value}) for value in (base, run)]
    assert difference(*scores).verdict == verdict


def test_without_interval_there_is_no_verdict():
    delta = difference(Score.parse({"value": 0.2}), Score.parse({"value": 0.4}))
    assert delta.verdict == "unknown"
    assert delta.interval_text() == "no interval"
    missing = difference(Score.parse({"value": None}), Score.parse({"value": 0.4}))
    assert missing.verdict == "unknown"
    assert missing.text() == "–"


def test_stderr_that_is_not_binomial_is_taken_as_given():
    # pass@1 over several samples a problem: a share, but not of 0/1 items
    score = Score(0.5, "pass@1", 0.01, 164)
    assert not score.is_zero_one
    assert score.interval() == pytest.approx((0.5 - 0.0195996, 0.5 + 0.0195996))
    assert _share(0.5, 164).is_zero_one


def test_text():
    assert score_text(_share(0.525, 200)) == "52.5 %"
    assert score_text(Score(14.237, "perplexity")) == "14.2"
    assert score_text(Score(math.nan, "acc")) == "–"
    assert difference(_share(0.355, 200), _share(0.515, 200)).text() == "+16.0 pp"
    assert difference(_share(0.5, 200), _share(0.5, 200)).text() == "0.0 pp"
    for verdict, sign in SIGNS.items():  # the page's style has a color for each
        assert str(verdict_mark(verdict)) == f'<span class="verdict {verdict}">{sign}</span>'


def _answered(folder: Path, values: list[float], prompts: str = "p", **changes) -> Score:
    """A score with its items beside it, as an evaluation leaves them."""
    rows = [
        {"task": "t", "item": f"i{n}", "filter": "none", "prompt_sha256": f"{prompts}{n}",
         "metrics": {"exact_match": value}}
        for n, value in enumerate(values)
    ]  # fmt: skip
    folder.mkdir()
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    share, n = sum(values) / len(values), len(values)
    stderr = math.sqrt(share * (1 - share) / (n - 1))
    task = {"metric": "exact_match", "value": share, "n": n, "stderr": stderr}
    task |= {"filter": "none", "samples": "samples.jsonl"}
    return Score.parse({**task, **changes}, folder)


def test_the_same_prompts_are_compared_in_pairs(tmp_path):
    rng = np.random.default_rng(4)
    base = (rng.random(200) < 0.5).astype(float)
    run = base.copy()
    run[np.flatnonzero(base == 0)[:11]] = 1.0  # 11 gained, none lost: McNemar's p is 0.001
    first, second = _answered(tmp_path / "a", [*base]), _answered(tmp_path / "b", [*run])
    delta = difference(first, second)
    assert delta.paired and delta.verdict == "better" and delta.value == pytest.approx(0.055)
    low, high, _ = paired_bootstrap(run - base, np.random.default_rng(0))
    assert (delta.low, delta.high) == (low, high) and low > 0
    apart = difference(first, _answered(tmp_path / "c", [*run], prompts="other"))
    assert not apart.paired and apart.verdict == "unclear" and apart.low < 0


def test_identical_answers_differ_by_nothing(tmp_path):
    values = [0.0, 1.0] * 100
    delta = difference(_answered(tmp_path / "a", values), _answered(tmp_path / "b", values))
    assert (delta.value, delta.low, delta.high, delta.verdict) == (0.0, 0.0, 0.0, "unclear")
    assert delta.text() == "0.0 pp" and delta.interval_text() == "[0.0, 0.0]"


def test_a_score_that_is_not_its_items_mean_is_not_paired(tmp_path):
    first = _answered(tmp_path / "a", [0.0, 1.0, 1.0, 0.0])
    weighted = _answered(tmp_path / "b", [1.0, 1.0, 1.0, 0.0], value=0.6)
    corpus = _answered(tmp_path / "c", [math.nan] * 4, value=0.6)
    gone = _answered(tmp_path / "d", [1.0, 1.0, 1.0, 0.0], samples="gone.jsonl")
    assert not any(difference(first, other).paired for other in (weighted, corpus, gone))
