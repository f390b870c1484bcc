"""Claims are read, tested by seed, and shown with their verdicts."""

import json
import math
from pathlib import Path

import pytest
import yaml

from eval.effects import __main__ as program
from eval.effects.claims import Effect, Made, Row, judge, load_claims, table
from eval.effects.scratch import run as from_scratch
from eval.effects.scratch import schedule
from moe_finetune.errors import RecipeError
from moe_finetune.recipe.method import resolve_method
from moe_finetune.study.recipe import load_study

pytestmark = pytest.mark.usefixtures("p0_released")

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "eval/effects").glob("*.yaml"))


def verdict(row: dict, ours: list[float], base: list[float]) -> str:
    arms = {"ours": ours, "base": base}
    results = {a: {s: Made({"x": v}) for s, v in enumerate(vs)} for a, vs in arms.items()}
    effects = [Effect(number=1, name="n", paper="p", rows=[Row.model_validate(row)])]
    claims = load_claims(FILES[0]).model_copy(update={"effects": effects})
    (tested,) = judge(claims, results)
    return tested["verdict"]


@pytest.mark.parametrize(
    ("claim", "ours", "expected"),
    [
        ("up", [2.0, 2.1, 2.2], "reproduced"),
        ("down", [2.0, 2.1, 2.2], "opposite"),
        ("up", [1.0, 1.5, 1.2], "sign only"),
        ("up", [0.9, 1.0, 1.02], "not reproduced"),
        ("up", [2.0], "sign only"),
        ("same", [1.01, 1.0, 1.02], "reproduced"),
        ("same", [0.5, 1.6, 1.0], "sign only"),
        ("same", [2.0, 2.1, 2.2], "not reproduced"),
    ],
)
def test_verdicts(claim, ours, expected):
    row = {"metric": "x", "arm": "ours", "against": "base", "claim": claim}
    assert verdict(row, ours, [1.0] * len(ours)) == expected


def test_a_limit_and_a_number_as_baseline():
    row = {"metric": "x", "arm": "ours", "against": "base", "claim": "down", "at_most": 0.5}
    assert verdict(row, [0.4, 0.41, 0.42], [1.0, 1.0, 1.0]) == "reproduced"
    assert verdict(row, [0.7, 0.71, 0.72], [1.0, 1.0, 1.0]) == "sign only"
    assert verdict(row | {"against": 1.0, "at_most": None}, [0.7, 0.71, 0.72], []) == "reproduced"
    assert verdict(row, [0.4], []) == "not run"


def test_a_curve_is_read_at_its_end_by_its_change_and_by_its_distance():
    made = {
        "a": {1: Made({"x": [4.0, 3.0, 2.0, 1.0]})},
        "b": {1: Made({"x": [4.0, 3.0, 2.0, 3.0]})},
    }
    expected = {"quarter": 1.0, "change": -3.0, "rmse": 1.0}
    rows = [Row(metric="x", arm="a", against=0, claim="down", read=read, other_arm="b")
            for read in expected]  # fmt: skip
    effect = Effect(number=7, name="n", paper="p", rows=rows)
    claims = load_claims(FILES[0]).model_copy(update={"effects": [effect]})
    tested = judge(claims, made)
    assert [row["value"] for row in tested] == list(expected.values())
    assert table(tested).count("| 7 |") == 1, "the effect is named in its first row"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_of_a_claim_is_run_and_every_method_exists(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    claims = load_claims(file)
    arms = {f"{name}/{arm}" for name, part in claims.programs.items() for arm in part.arms}
    if claims.study is not None:
        arms |= set(load_study(claims.study).axes["arm"])
    for effect in claims.effects:
        for row in effect.rows:
            named = [row.arm] if isinstance(row.arm, str) else row.arm
            named += [arm for arm in (row.against, row.other_arm) if isinstance(arm, str)]
            assert set(named) <= arms, effect.name
    for part in claims.programs.values():
        if part.module == "eval.effects.scratch":
            assert all(resolve_method(method) for method in part.arms.values())


def test_a_mistake_in_a_file_is_named(tmp_path):
    (tmp_path / "c.yaml").write_text("title: t\neffects: []\nseed: 1\n")
    with pytest.raises(RecipeError, match="seed"):
        load_claims(tmp_path / "c.yaml")


def test_programs_run_once_and_are_judged(tmp_path, monkeypatch, capsys):
    claims = {
        "title": "t",
        "seeds": [1, 2],
        "programs": {"p": {"module": "eval.effects.p4_figure2", "arms": {"sweep": {}},
                           "settings": {"count": 8, "k": 3, "width": 8, "trials": 3}}},
        "effects": [{"number": 13, "name": "n", "paper": "p", "rows": [
            {"metric": "greedy_lost", "arm": "p/sweep", "against": 0, "claim": "down"}]}],
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(claims))
    words = ["effects", str(tmp_path / "c.yaml"), "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    assert program.main() == 0
    files = sorted((tmp_path / "out/programs").rglob("*.json"))
    assert [file.stem for file in files] == ["seed_1", "seed_2"]
    assert (tmp_path / "out/pictures/figure2.png").is_file()
    times = [file.stat().st_mtime_ns for file in files]
    assert program.main() == 0 and [file.stat().st_mtime_ns for file in files] == times
    (row,) = json.loads((tmp_path / "out/effects.json").read_text())
    assert row["seeds"] == [1, 2] and row["verdict"] in capsys.readouterr().out + row["verdict"]


SMALL = {
    "steps": 12,
    "learning_rate": 3e-3,
    "model": {"hidden_size": 64, "layers": 2, "experts": 4, "top_k": 2, "expert_width": 32},
    "mixture": {"code_rows": 1, "prose_rows": 1, "arithmetic_rows": 1, "length": 96},
}


@pytest.mark.slow
def test_from_scratch_arms_of_a_seed_begin_alike_and_divergence_has_its_step():
    balance = {"terms": {"load_balance": {"weight": 0.01}}}
    first, again = (from_scratch(SMALL, balance, 3) for _ in range(2))
    assert first == again and len(first["loss"]) == 12 and first["loss"][-1] < first["loss"][0]
    assert first["diverged"] is None and math.isfinite(first["held_out"])
    wild = from_scratch(SMALL | {"learning_rate": 1e12}, balance, 3)
    assert wild["loss"][0] == first["loss"][0]
    assert wild["held_out"] is None if wild["diverged"] is not None else wild["held_out"] > 5


def test_the_schedule_from_scratch():
    assert [schedule(step, 40) for step in (0, 3, 4, 39)] == pytest.approx(
        [0.25, 1.0, 1.0, 0.1017], abs=1e-3
    )
