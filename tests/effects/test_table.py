"""Intervals, verdicts, and the table that is made of runs."""

import json

import numpy as np
import pytest

from eval.effects.claims import EFFECTS
from eval.effects.comparisons import Comparison, Effect
from eval.effects.readings import (
    after,
    change,
    curve_rmse,
    determinantal_gain,
    fold_change,
    fold_mean,
    greedy_recovery,
    half_recovery,
    largest_gradient,
    log_change,
    log_end,
    mean_of_probes,
    recovery_gap,
    recovery_loss,
    score,
    spikes,
)
from eval.effects.shards import Shard
from eval.effects.table import compare, directions_markdown, effect_rows, markdown, write_tables
from eval.effects.upcycled import upcycle_rows
from eval.effects.verdicts import verdict_of_no_change, verdict_of_sign
from moe_finetune.errors import RecipeError
from moe_finetune.metrics.statistics import Interval


@pytest.mark.parametrize(
    ("low", "mean", "high", "sign", "wanted"),
    [
        (0.1, 0.2, 0.3, 1, "reproduced"),
        (0.1, 0.2, 0.3, -1, "opposite"),
        (-0.3, -0.2, -0.1, -1, "reproduced"),
        (-0.3, -0.2, -0.1, 1, "opposite"),
        (-0.1, 0.2, 0.5, 1, "sign only"),
        (-0.5, -0.2, 0.1, 1, "not reproduced"),
        (-np.inf, 0.2, np.inf, 1, "sign only"),
        (0.0, 0.0, 0.0, 1, "not reproduced"),
    ],
)
def test_the_verdict_of_a_sign(low, mean, high, sign, wanted):
    assert verdict_of_sign(Interval(mean, low, high, 5), sign) == wanted


def test_the_verdict_of_no_change():
    assert verdict_of_no_change(Interval(0.01, -0.01, 0.03, 5), 0.05) == "reproduced"
    assert verdict_of_no_change(Interval(0.01, -0.07, 0.09, 5), 0.05) == "sign only"
    assert verdict_of_no_change(Interval(0.08, 0.06, 0.1, 5), 0.05) == "not reproduced"


def _runs(**arms: dict[int, float | None]) -> dict[Shard, dict]:
    return {
        Shard("finetune", arm, seed): {"probes": [{"m": 0.0}, {"m": value}]}
        for arm, values in arms.items()
        for seed, value in values.items()
    }


def _comparison(sign=1, **more) -> Comparison:
    return Comparison("m", after("m"), "finetune", "ours", "base", sign, **more)


def test_arms_are_paired_by_seed_whatever_their_order():
    # Unpaired, the spread between seeds would hide the difference.
    runs = _runs(
        ours={3: 30.2, 1: 10.19, 2: 20.21, 9: 5.0}, base={1: 10.0, 2: 20.0, 3: 30.0, 8: 7.0}
    )
    row = compare(_comparison(), runs)
    assert row.difference.seeds == 3
    assert row.difference.mean == pytest.approx(0.2)
    assert (row.arm_mean, row.baseline_mean) == (pytest.approx(20.2), pytest.approx(20.0))
    assert row.verdict == "reproduced"
    assert compare(_comparison(-1), runs).verdict == "opposite"


def test_runs_without_the_number_are_counted_and_missing_arms_said():
    runs = _runs(ours={1: 2.0, 2: None, 3: 3.0}, base={1: 1.0, 2: 1.0, 3: None})
    row = compare(_comparison(), runs)
    assert (row.difference.seeds, row.excluded) == (1, 2)
    missing = compare(_comparison(), _runs(ours={1: 2.0}))
    assert (missing.verdict, missing.difference) == ("not run", None)


def test_a_share_of_the_baseline_must_be_met():
    runs = _runs(ours={1: 0.3, 2: 0.31, 3: 0.32}, base={1: 1.0, 2: 1.0, 3: 1.0})
    assert compare(_comparison(-1, at_most=0.5), runs).verdict == "reproduced"
    assert compare(_comparison(-1, at_most=0.1), runs).verdict == "sign only"


def test_no_change_is_a_share_of_the_baseline():
    runs = _runs(ours={1: 10.2, 2: 10.21, 3: 10.22}, base={1: 10.0, 2: 10.0, 3: 10.0})
    assert compare(_comparison(0, margin=0.1), runs).verdict == "reproduced"
    assert compare(_comparison(0, margin=0.001), runs).verdict == "not reproduced"


def test_readings_of_a_run():
    rows = [{"m": 4.0}, {"m": 1.0, "s": 0.5}, {"m": 2.5, "s": 0.9}]
    assert change("m")({"probes": rows}) == -1.5
    assert mean_of_probes("s")({"probes": rows}) == pytest.approx(0.7)
    log = [{"v": v, "other": 0.0} for v in (5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 0.0)]
    assert log_change("v")({"log": log}) == pytest.approx(0.5 - 5.0)
    assert log_change("v")({"log": [{"other": 1.0}]}) is None
    assert curve_rmse("v")({"log": log}, {"log": [{"v": row["v"] + 2} for row in log]}) == 2
    assert score()({"scores": {"mean": 0.25}}) == 25
    assert log_end("v")({"log": log}) == 0.5 and log_end("v")({"log": []}) is None
    assert fold_mean("rank")({"rank": [1.0, 2.0, 6.0]}) == 3
    assert fold_mean("rank")({}) is None
    curves = {"curves": {"rank": [[4.0, 6.0], [9.0, 9.0], [2.0, 7.0]]}}
    assert fold_change("rank")(curves) == -0.5 and fold_change("other")(curves) is None
    folds = {"accuracy": [0.5, 0.75], "determinantal_accuracy": [0.5, 0.5]}
    assert determinantal_gain(folds) == -0.125 and determinantal_gain({"accuracy": [1]}) is None
    norms = [9.0, 8.0, 1.0, 3.0, *[2.0] * 16]  # the first tenth does not count
    assert largest_gradient({"gradient_norm": norms}) == 3


def test_a_spike_is_a_step_far_above_those_before():
    loss = [5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3, 4.2, 6.0, 4.1, 4.0]
    assert spikes({"loss": loss}) == 1
    assert spikes({"loss": sorted(loss, reverse=True)}) == 0


def test_half_recovery_lies_between_the_two_levels():
    rows = [
        {"coherence": c, "greedy": g, "optimal": 1.0}
        for c, g in ((0.1, 1.0), (0.3, 0.8), (0.5, 0.3), (0.7, 0.0))
    ]
    assert half_recovery({"random": rows}) == pytest.approx(0.3 + 0.2 * 0.3 / 0.5)
    assert greedy_recovery(0.45, "random")({"random": rows}) == 0.3
    assert greedy_recovery(0.45, "gaussian")({"random": rows}) is None
    assert recovery_gap(0.33)({"random": rows}) == pytest.approx(-0.2)
    assert recovery_loss(0.1, 0.5)({"random": rows}) == pytest.approx(-0.7)


def test_all_effects_are_in_the_table_and_those_not_run_say_so():
    assert [effect.number for effect in EFFECTS] == list(range(1, 25))
    rows = effect_rows({})
    text = markdown(rows)
    for effect in EFFECTS:
        assert f"| {effect.number} | {effect.name} |" in text
    assert "run the upcycle miniature first" in text
    assert "**not run**" in text


def test_the_files_hold_what_the_table_says(tmp_path):
    runs = _runs(ours={1: 1.1, 2: 1.3}, base={1: 1.0, 2: 1.0})
    effects = effect_rows(runs, effects=[Effect(7, "It moves", "a lot", [_comparison()])])
    write_tables(effects, runs, tmp_path)
    (row,) = json.loads((tmp_path / "effects.json").read_text())
    assert row["effect"] == 7 and row["difference"] == pytest.approx(0.2)
    assert row["verdict"] == "sign only" and row["seeds"] == 2
    assert "+20 %" in (tmp_path / "effects.md").read_text()
    head, line = (tmp_path / "effects.csv").read_text().splitlines()
    assert dict(zip(head.split(","), line.split(","), strict=True))["arm"] == "ours"
    assert (
        "| 7 | It moves | a lot | m: ours against base | 1 -> 1.2 |"
        in (tmp_path / "effects.md").read_text()
    )


def test_directions_say_which_went_the_other_way():
    def run(**values):
        return {"probes": [values], "log": [], "scores": {}}

    runs = {
        Shard("finetune", "aux_loss", 1): run(output_cosine=0.2),
        Shard("finetune", "dpp", 1): run(output_cosine=0.1),
        Shard("finetune", "ncl", 1): run(output_cosine=0.3),
    }
    lines = directions_markdown(runs).splitlines()
    assert any("| dpp | output_cosine |" in line and line.endswith("| yes |") for line in lines)
    assert any("| ncl | output_cosine |" in line and "**no**" in line for line in lines)
    assert len(lines) == 4


def test_upcycling_joins_as_effect_eleven(tmp_path):
    def arm(cmr, entropy):
        values = {"cmr_1": cmr, "s_rl": entropy}
        metrics = {k: {"mean": float(np.mean(v)), "seeds": v} for k, v in values.items()}
        return {"splits": {"test": metrics}}

    arms = {"BTX": arm([2.9, 2.8, 2.85], [1.7, 1.8, 1.75])}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"arms": arms}))
    with pytest.raises(RecipeError, match="has no 'SvMoE'"):
        upcycle_rows(str(tmp_path))
    arms["SvMoE"] = arm([2.5, 2.4, 2.46], [0.5, 1.9, 1.2])
    results.write_text(json.dumps({"arms": arms}))
    rank, entropy = upcycle_rows(str(tmp_path))
    assert rank.verdict == "reproduced"
    assert rank.difference.mean == pytest.approx(np.mean([-0.4, -0.4, -0.39]))
    assert entropy.verdict == "sign only"
    assert "| 11 | CMR_1 and S_RL fall with SvMoE |" in markdown(effect_rows({}, [rank, entropy]))
    assert upcycle_rows(None) == []
    results.write_text("{")
    with pytest.raises(RecipeError, match="moe-finetune upcycle"):
        upcycle_rows(str(tmp_path))
