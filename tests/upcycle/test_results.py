from __future__ import annotations

import math

import pytest

from moe_finetune.upcycle.results import Arm, Estimate, difference, summarize
from moe_finetune.upcycle.tables import tables


def measured(perplexity, cmr=None, entropy=0.5):
    routing = {
        "cmr_1": {"mean": cmr, "std": 1.0},
        "cmr_2": {"mean": 3.0, "std": 1.5},
        "s_rl": {"mean": entropy, "std": 0.5},
        "score_entropy": {"mean": 0.25, "std": 0.125},
        "selected": [[[3, 1, 2], [2, 2, 2]]],
    }
    split = {"perplexity": {"mean": perplexity, "std": 2.0, "of_all_tokens": perplexity - 1}}
    split |= {"losses": [math.log(perplexity), 0.0, math.log(5.0)], "categories": [0, 0, 1]}
    split |= {"routing": routing} if cmr is not None else {}
    return {
        "parameters": 10,
        "splits": dict.fromkeys(("train", "validation", "test"), split),
        "judgement": {
            "accuracy": 0.6,
            "stderr": 0.05,
            "yes": 0.4,
            "count": 50,
            "shots": 5,
            "accuracy_of_sums": 0.55,
            "answer_tokens": [1, 2],
            "categories": {"law": [3, 4]},
        },
    }


CATEGORIES = ("law", "code", "none")
ARMS = [
    Arm("Dense", (measured(9.0), measured(9.5), measured(9.25))),
    Arm("BTX", (measured(8.0, 2.75), measured(8.5, 3.0), measured(8.0, 3.25))),
    Arm("SvMoE", (measured(8.1, 2.25), measured(8.3, 2.5), measured(8.2, 2.5))),
]


def test_an_interval_is_students():
    found = Estimate.of([1.0, 2.0, 4.0])
    half = 4.302652730 * math.sqrt(7 / 3) / math.sqrt(3)  # t of 2 degrees at 97.5 %
    assert found.mean == pytest.approx(7 / 3)
    assert (found.low, found.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    assert math.isnan(Estimate.of([3.0]).low)
    assert Estimate.of([3.0]).to_mapping()["interval"] == [None, None]


def test_differences_are_paired_by_seed():
    found = difference(ARMS[2], ARMS[1], "cmr_1")
    assert found.values == (-0.5, -0.5, -0.75)
    summary = summarize(ARMS, CATEGORIES)
    said = summary["differences_on_test"]["SvMoE - BTX"]
    assert said["cmr_1"]["mean"] == pytest.approx(-7 / 12)
    assert said["perplexity"]["seeds"] == pytest.approx([0.1, -0.2, 0.2])
    assert set(summary["differences_on_test"]["SvMoE - Dense"]) == {
        "perplexity", "perplexity_of_all_tokens",
    }  # fmt: skip
    assert "cmr_1" not in summary["arms"]["Dense"]["splits"]["test"]


CLUSTERS = {"law": 1, "code": 0, "none": 1}
TOKENS = {
    "law": {"train": 1200, "validation": 130, "test": 170},
    "code": {"train": 2000, "validation": 300, "test": 400},
    "none": {"train": 5, "validation": 6, "test": 7},
}


def test_tables_are_the_papers_and_then_ours():
    found = {table.title: table for table in tables(ARMS, CLUSTERS, TOKENS)}
    assert [title.rpartition(" (")[2] for title in found][:6] == [
        f"Table {number})" for number in range(1, 7)
    ]
    test = found["Evaluation on the test set (Table 1)"]
    assert test.columns == ["model", "PPL", "CMR_1", "S_RL"]
    assert [row[0] for row in test.rows] == ["Dense", "BTX", "SvMoE"]
    assert test.rows[0][1].startswith("9.250 ± 2.00 [") and test.rows[0][2:] == ["–", "–"]
    assert test.rows[1][2].startswith("3.000 ± 1.00") and test.rows[2][3].startswith("0.500 ± 0.50")
    judged = found["Binary judgement, 5 solved examples (Table 2)"]
    assert judged.rows[0][1].startswith("60.0 ± 5.0") and judged.rows[0][2:] == ["40", "50", "55.0"]
    assert "no of 1 tokens and yes of 2" in judged.note
    counted = found["Tokens of each cluster (Table 3)"]
    assert counted.rows == [
        ["1", "2,000", "300", "400", "2,700"],
        ["2", "1,205", "136", "177", "1,518"],
    ]
    second = found["CMR_2 on the test set (Table 4)"]
    assert second.columns == ["model", "CMR_2"] and [r[0] for r in second.rows] == ["BTX", "SvMoE"]
    assert second.rows[1][1].startswith("3.000 ± 1.50")
    assert found["Categories of each cluster (Table 5)"].rows == [["1", "code"], ["2", "law, none"]]
    both = found["Evaluation on training and validation (Table 6)"]
    assert both.columns == ["split", "model", "PPL", "CMR_1", "CMR_2", "S_RL"]
    assert [row[:2] for row in both.rows][2:4] == [["train", "SvMoE"], ["validation", "Dense"]]
    assert both.rows[1][4].startswith("3.000 ± 1.50") and both.rows[0][3] == "–"
    by_category = found["Perplexity by category, test"]
    assert by_category.columns == ["", "Dense", "BTX", "SvMoE"]
    assert [row[0] for row in by_category.rows] == ["law", "code"]  # "none" has no test text
    assert by_category.rows[0][1].startswith("5.125 [")  # means of 9, 9.5, 9.25 with 1
    assert by_category.rows[1][3].startswith("5.000 [")
    (row,) = found["Judgement by category"].rows
    assert row[0] == "law (4)" and row[1].startswith("75.0 [")
    entropy = found["Entropy of the top-k scores"]
    assert entropy.rows[0][0] == "BTX" and entropy.rows[0][1].startswith("0.250 ± 0.12")
    differences = found["Differences on test: SvMoE"]
    assert differences.rows[1][2].startswith("-0.583 [") and differences.rows[0][2] == "–"
    assert "| SvMoE | 8.200 ± 2.00 [" in test.to_markdown()


def test_wherever_perplexity_is_shown_the_papers_order_is_too():
    shown = [table for table in tables(ARMS, CLUSTERS, TOKENS) if "PPL" in " ".join(table.columns)]
    assert len(shown) == 3  # Tables 1 and 6, and the differences
    perplexity = [t for t in tables(ARMS, CLUSTERS, TOKENS) if "erplexity" in t.title]
    for table in [*shown, *perplexity]:
        assert "Dense 1.156, BTX 1.169, SvMoE 1.199" in table.note, table.title
