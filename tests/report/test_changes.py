"""The page's opening: what the losses changed against the baseline, and how strong they were."""

from __future__ import annotations

import json
import math

import pytest

from moe_finetune.report.context import Report
from moe_finetune.report.runs import read_runs
from moe_finetune.report.sections.changes import CHANGES, change_text
from moe_finetune.report.sections.strength import STRENGTH
from tests.report.folders import write_run

EVALUATION = {
    "eval_loss": 2.0,
    "eval_routing/expert_overlap": 0.4,
    "eval_routing/score_variance": 0.02,
    "eval_routing/entropy": 2.2,
    "eval_routing/max_violation": 0.5,
}
MEASURED = {
    "strength/variance/weight": 13.0,
    "strength/variance/share_router": 0.9934,
    "strength/variance/share_experts": 0.16,
    "strength/variance/cosine_router": 0.12,
    "strength/variance/cosine_experts": 0.03,
    "strength/variance/weight_for_10_percent": 1.3,
}


def evaluated(folder, values):
    """Append an earlier and a last evaluation to a run's log."""
    rows = [
        {"kind": "eval", "step": 290, **dict.fromkeys(EVALUATION, 77.0)},
        {"kind": "eval", "step": 300, **values},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def page(*folders):
    return CHANGES.render(Report(read_runs(folders), "title"))


def test_bars_and_percent_against_the_baseline(tmp_path):
    ours = {
        "eval_loss": 2.01,
        "eval_routing/expert_overlap": 0.25,
        "eval_routing/score_variance": 0.037,
        "eval_routing/entropy": 1.1,
        "eval_routing/max_violation": 0.6,
    }
    one = evaluated(write_run(tmp_path / "aux_loss", 1), EVALUATION)
    two = evaluated(write_run(tmp_path / "ours", 2), {**ours, **MEASURED})
    text = page(one, two)
    assert "<strong>ours</strong> against aux_loss: score variance +85\u00a0%" in text
    assert "expert overlap −37\u00a0%" in text or "expert overlap −38\u00a0%" in text
    assert "validation loss +0.5\u00a0%" in text
    for share in ("−50\u00a0%", "+20\u00a0%"):
        assert share in text
    assert text.count('class="bars"') == 5
    # The longer bar ends at 78 % of the width, the other in proportion: 0.25 of 0.4.
    assert 'width="78.00%"' in text and 'width="48.75%"' in text
    assert "77.0" not in text  # the earlier evaluation
    strength = STRENGTH.render(Report(read_runs([one, two]), "title"))
    assert "<td>99\u00a0%</td>" in strength and "<td>13.0</td>" in strength
    assert STRENGTH.render(Report(read_runs([one]), "title")) is None


def test_better_and_worse_are_told_by_the_metrics_good_way(tmp_path):
    ours = {**EVALUATION, "eval_routing/max_violation": 0.7, "eval_routing/expert_overlap": 0.3}
    one = evaluated(write_run(tmp_path / "aux_loss", 1), EVALUATION)
    text = page(one, evaluated(write_run(tmp_path / "ours", 2), ours))
    assert 'class="big verdict worse">+40\u00a0%' in text
    assert 'class="big verdict better">−25\u00a0%' in text
    assert text.count("verdict unclear") == 3


def test_nothing_is_shown_without_a_baseline_or_an_evaluation(tmp_path):
    one = write_run(tmp_path / "aux_loss", 1)
    two = write_run(tmp_path / "ours", 2)
    assert page(one, two) is None
    assert page(evaluated(one, EVALUATION)) is None


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(0.4, 0.25, "−38\u00a0%"), (2.0, 2.01, "+0.5\u00a0%"), (0.0, 1.0, "–"), (math.nan, 1.0, "–")],
)
def test_change_in_percent(before, after, text):
    assert change_text(before, after) == text
