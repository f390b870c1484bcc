"""The arms' measurements as a study's table, by hand."""

import math

import pytest
from scipy import stats

from moe_finetune.study.render import to_markdown
from moe_finetune.study.table import make_table
from moe_finetune.upcycle.results import (
    category_results,
    cluster_rows,
    split_results,
    summarize,
)

SEEDS = [3, 5, 8]
CATEGORIES = ("law", "code", "none")


def measured(perplexity, cmr=None, entropy=0.5):
    routing = {
        "cmr_1": {"mean": cmr, "std": 1.0},
        "cmr_2": {"mean": 3.0, "std": 1.5},
        "s_rl": {"mean": entropy, "std": 0.5},
        "score_entropy": {"mean": 0.25, "std": 0.125},
    }
    split = {"perplexity": {"mean": perplexity, "std": 2.0, "of_all_tokens": perplexity - 1}}
    split |= {"losses": [math.log(perplexity), 0.0, math.log(5.0)], "categories": [0, 0, 1]}
    split |= {"routing": routing} if cmr is not None else {}
    judgement = {"value": 0.6, "stderr": 0.1, "n": 4, "categories": {"law": [3, 4]}}
    splits = dict.fromkeys(("train", "validation", "test"), split)
    return {"parameters": 10, "splits": splits, "scores": {"judgement": judgement}}


ARMS = {
    "Dense": [measured(9.0), measured(9.5), measured(9.25)],
    "BTX": [measured(8.0, 2.75), measured(8.5, 3.0), measured(8.0, 3.25)],
    "SvMoE": [measured(8.1, 2.25), measured(8.3, 2.5), measured(8.2, 2.5)],
}


def cells(table):
    return {(group.name, row.label): row.cells for group, row in table.rows}


def test_every_split_compares_the_arms_with_the_last(tmp_path):
    table = make_table(split_results(ARMS, SEEDS, tmp_path))
    assert [group.name for group in table.groups] == [
        "test texts", "validation texts", "train texts",
    ]  # fmt: skip
    found = cells(table)
    dense, btx = found["test texts", "Dense"], found["test texts", "BTX"]
    assert dense["perplexity"].mean == 9.25 and dense["perplexity"].std == 0.25
    assert set(dense) == {"perplexity", "judgement"}
    assert "judgement" not in found["train texts", "BTX"]
    # BTX - SvMoE, seed by seed
    test = btx["cmr_1"].test
    assert test.difference == pytest.approx((0.5 + 0.5 + 0.75) / 3)
    wanted = stats.ttest_rel([2.75, 3.0, 3.25], [2.25, 2.5, 2.5])
    assert test.p == pytest.approx(wanted.pvalue) and test.p_holm >= test.p
    assert (test.low, test.high) == pytest.approx(tuple(wanted.confidence_interval()))
    assert dense["perplexity"].test.difference == pytest.approx(9.25 - 8.2)
    assert btx["cmr_2"].test.p == 1.0, "equal in every seed"
    assert found["test texts", "SvMoE"]["cmr_1"].best and not btx["cmr_1"].best
    assert found["test texts", "SvMoE"]["cmr_1"].test is None


def test_two_seeds_of_equal_difference_are_not_enough(tmp_path):
    arms = {name: seeds[:2] for name, seeds in ARMS.items()}  # 2.75 - 2.25 and 3.0 - 2.5
    table = make_table(split_results(arms, SEEDS[:2], tmp_path))
    test = cells(table)["test texts", "BTX"]["cmr_1"].test
    assert (test.name, test.p, test.verdict) == ("not enough seeds", None, "unknown")


def test_categories_have_perplexity_and_judgement(tmp_path):
    table = make_table(category_results(ARMS, SEEDS, tmp_path, CATEGORIES))
    assert [group.name for group in table.groups] == ["law", "code"]  # "none" has no test text
    found = cells(table)
    assert found["law", "Dense"]["perplexity"].mean == pytest.approx(5.125)  # 9, 9.5, 9.25 and 1
    assert found["law", "BTX"]["judgement"].mean == 0.75
    assert found["code", "SvMoE"]["perplexity"].mean == pytest.approx(5.0)
    assert "judgement" not in found["code", "SvMoE"]


def test_clusters_are_counted_as_in_the_paper():
    tokens = {
        "law": {"train": 1200, "validation": 130, "test": 170},
        "code": {"train": 2000, "validation": 300, "test": 400},
        "none": {"train": 5, "validation": 6, "test": 7},
    }
    assert cluster_rows({"law": 1, "code": 0, "none": 1}, tokens) == [
        ["ID", "categories", "train", "validation", "test", "total"],
        ["1", "code", "2,000", "300", "400", "2,700"],
        ["2", "law, none", "1,205", "136", "177", "1,518"],
    ]


def test_the_files_hold_what_the_table_holds(tmp_path):
    table = make_table(split_results(ARMS, SEEDS, tmp_path))
    summary = summarize(ARMS, table)
    assert list(summary["arms"]) == ["Dense", "BTX", "SvMoE"]
    ours = summary["arms"]["SvMoE"]["splits"]["validation"]["cmr_1"]
    assert ours == {"mean": pytest.approx(7.25 / 3), "seeds": [2.25, 2.5, 2.5]}
    assert "cmr_1" not in summary["arms"]["Dense"]["splits"]["test"]
    text = to_markdown(table)
    assert "| test texts: |" in text and "| BTX | **8.1667 ± 0.2887** | 3.0000 ± 0.2500" in text
