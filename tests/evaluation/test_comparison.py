from __future__ import annotations

import json

import numpy as np
import pytest

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.comparison import (
    compare,
)
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import to_json
from moe_finetune.io.rows import write_jsonl


def write(folder, tasks, prompts="same", complete=True):
    """Write results as the engine does: label -> list of item values."""
    entries = {}
    for name, values in tasks.items():
        rows = [
            {
                "task": name, "doc_id": i, "item": f"{name}-{i // 2}", "filter": f,
                "prompt_sha256": f"{prompts}-{i}", "metrics": {"acc": v if f == "good" else 0.0},
                "replies": [["x"]],
            }
            for i, v in enumerate(values)
            for f in ("bad", "good")
        ]  # fmt: skip
        write_jsonl(folder / f"{name}.jsonl", rows)
        entries[name] = {
            "task": name, "metric": "acc", "filter": "good", "n": len(values),
            "value": float(np.mean(values)), "samples": f"{name}.jsonl",
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
    assert {name: row.verdict for name, row in rows.items()} == {
        "up": "win", "same": "tie", "down": "loss",
    }  # fmt: skip
    assert rows["up"].test == "McNemar" and rows["up"].p == pytest.approx(2 * 0.5**50)
    assert rows["up"].difference == pytest.approx(0.5)
    assert rows["up"].low < 0.5 < rows["up"].high
    assert rows["same"].p == 1.0
    assert result.counts == {"b": {"win": 1, "tie": 1, "loss": 1}}
    assert result.gains["b"] == pytest.approx((0.75 / 0.25 + 0.5 / 0.5 + 0.6 / 1.0) / 3 - 1)
    again = compare([a, b])
    assert again.to_json() == result.to_json()
    assert json.loads(result.to_json())["rows"][0]["task"] == "up"
    assert "1 wins, 1 ties, 1 losses" in result.to_text()
    assert "<td>up</td>" in result.to_html()


def test_the_headline_filter_is_the_one_that_is_compared(tmp_path):
    # The samples' other filter holds zeros; using it would make every task a tie.
    a = write(tmp_path / "a", {"t": [0] * 20})
    b = write(tmp_path / "b", {"t": [1] * 20})
    assert compare([a, b]).rows[0].verdict == "win"


def test_fractions_use_the_bootstrap_and_seeds_give_deviations(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 1, (3, 80))
    a = [write(tmp_path / f"a{i}", {"t": list(base[i])}) for i in range(3)]
    b = [write(tmp_path / f"b{i}", {"t": list(base[i] + 0.2)}) for i in range(3)]
    row = compare([a, b], ["base", "method"]).rows[0]
    assert row.test == "bootstrap" and row.verdict == "win"
    assert row.baseline_std == pytest.approx(np.std(base.mean(1), ddof=1))
    assert row.difference == pytest.approx(0.2)


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
