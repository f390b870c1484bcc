"""The strength study: its arms, its table and pictures, and one run through the real trainer."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.effects.shards import Shard
from eval.effects.strength import load_strength_study, shard_of
from eval.effects.strength_table import markdown, points_of, strongest, write_strength
from moe_finetune.errors import RecipeError
from moe_finetune.experiments.commands import show_plan

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "studies" / "strength.yaml"


def result(loss, overlap, weight=None):
    names = {"validation_loss": loss, "expert_overlap": overlap, "score_variance": 0.02,
             "max_violation": 0.5}  # fmt: skip
    log = [{"step": 10}] if weight is None else [{"step": 10, "strength/variance/weight": weight}]
    return {"probes": [{"step": 0, **dict.fromkeys(names, 9.0)}, {"step": 9, **names}], "log": log}


@pytest.fixture
def study():
    overrides = [
        "methods.orthogonal_variance.terms=[variance]",
        "shares=[0.1,0.3,1]",
        "seeds=[1,2]",
    ]
    return load_strength_study(RECIPE, overrides)


@pytest.fixture
def results():
    """Costs of 0.5 %, 1 % in the mean (0.4 and 1.6), and 4 %."""
    shards = {Shard("finetune", "baseline", s): result(2.0 * s, 0.4 * s) for s in (1, 2)}
    for share, one, two, overlap in ((0.1, 0.5, 0.5, 0.9), (0.3, 0.4, 1.6, 0.7), (1, 4, 4, 0.5)):
        for seed, cost in ((1, one), (2, two)):
            shards[shard_of("orthogonal_variance", share, seed)] = result(
                2.0 * seed * (1 + cost / 100), 0.4 * seed * overlap, 5 * share + seed
            )
    return shards


def test_every_method_gets_every_share_beside_the_balance():
    study = load_strength_study(RECIPE)
    arms = study.miniature().finetune.arms
    assert len(arms) == 1 + len(study.methods) * len(study.shares) >= 1 + 9 * 6
    assert len(study.seeds) >= 3
    method = arms["orthogonal_variance-0.3"]["terms"]
    assert method["orthogonality"] == method["variance"] == {"share": 0.3}
    assert method["load_balance"] == {"share": 0.1, "variant": "deepseek", "scope": "sequence"}
    assert arms["aux_loss-3"]["terms"]["load_balance"]["share"] == 3
    assert arms["cosine_orthogonality-1"]["terms"]["orthogonality"] == {
        "share": 1,
        "form": "cosine",
    }


def test_changes_are_paired_by_seed_and_the_strongest_affordable_share_is_taken(study, results):
    points = points_of(study, results)
    assert [point.share for point in points] == [0.1, 0.3, 1]
    middle = points[1]
    assert middle.cost == pytest.approx(0.01) and middle.moved == pytest.approx(-0.3)
    assert middle.weights["variance"] == pytest.approx(5 * 0.3 + 1.5)
    # Two costs 1.2 % apart: mean + 12.706 * 0.6 %.
    assert middle.cost_high == pytest.approx(0.01 + 12.7062 * 0.006, rel=1e-4)
    study.cost = 0.0101
    assert strongest(study, points, "orthogonal_variance") is middle
    study.cost = 0.004
    assert strongest(study, points, "orthogonal_variance") is None
    assert "| orthogonal_variance | expert_overlap | none |" in markdown(study, points)


def test_table_numbers_and_picture(study, results, tmp_path):
    study.cost = 0.0101
    text = write_strength(study, results, tmp_path)
    row = next(line for line in text.splitlines() if line.startswith("| orthogonal_variance"))
    assert row.startswith(
        "| orthogonal_variance | expert_overlap | 0.3 | variance 3 | 0.6 | 0.42 |"
    )
    assert "| -30 % | +1.0 %" in row
    assert all(line.count("|") == text.splitlines()[0].count("|") for line in text.splitlines())
    assert len(json.loads((tmp_path / "strength.json").read_text())["points"]) == 3
    root = ElementTree.parse(tmp_path / "strength.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall(".//{http://www.w3.org/2000/svg}use")) > 3, "a marker for each share"


def test_plan_and_refusals(capsys):
    show_plan(str(RECIPE), [], None)
    assert "165  runs: 9 methods at 6 shares" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="shares"):
        load_strength_study(RECIPE, ["shares=[]"])
    with pytest.raises(RecipeError, match=r"dpp-0\.01"):
        load_strength_study(RECIPE, ["methods.dpp.method={terms: {dpp: {epss: 1}}}"])
