"""A miniature from its recipe to its tables: resumed, refused, and listed when it fails."""

import json
import sys

import pytest
import yaml

from eval.effects.claims_at_shares import EVEN
from eval.effects.settings import load_miniature, with_table
from eval.effects.shards import STUDY_FILE, shards_of
from eval.effects.strength import run as run_strength
from eval.effects.study import effects_of, plan, run
from moe_finetune.errors import DependencyError, RecipeError
from moe_finetune.experiments.reproductions import REPRODUCTIONS, reproduction_of
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import load_recipe
from tests.conftest import ROOT

SHIPPED = ROOT / "recipes" / "studies" / "miniature.yaml"
DEMO_STRENGTH = ROOT / "recipes" / "studies" / "demo_strength.yaml"
CLASSIFICATION = {
    "arms": ["baseline", "orthogonality"],
    "setting": {
        "samples": 120, "informative": 5, "redundant": 3, "classes": 4, "experts": 6, "hidden": 5,
        "folds": 3, "batch": 32, "epochs": 2,
    },
}  # fmt: skip
RECOVERY = {"count": 7, "k": 3, "width": 8, "trials": 3}


@pytest.fixture
def recipe(tmp_path):
    def write(**changes):
        values = {
            "kind": "miniature",
            "seeds": [1, 2],
            "recovery": RECOVERY,
            "classification": CLASSIFICATION,
            **changes,
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
        return path

    return write


def test_the_shipped_study_covers_every_comparison():
    from eval.effects.claims import DIRECTIONS, EFFECTS

    study = load_miniature(SHIPPED)
    assert reproduction_of(SHIPPED).__name__ == REPRODUCTIONS["miniature"]
    assert len(study.seeds) >= 5
    arms = {(shard.part, shard.arm) for shard in shards_of(study)}
    assert effects_of(study)[0].comparisons[0].baseline == "aux_loss"
    compared = {c.arm: c.baseline for c in effects_of(study)[13].comparisons}
    assert compared["erc"] == "balance_erc" and compared["orthogonal_variance"] == "aux_loss"
    for comparison in (*DIRECTIONS, *(c for effect in EFFECTS for c in effect.comparisons)):
        assert (comparison.part, comparison.arm) in arms
        assert (comparison.part, comparison.baseline or comparison.arm) in arms


def test_the_study_over_shares_trains_as_the_demo_does_and_compares_arms_of_one_balance():
    study = load_miniature(DEMO_STRENGTH)
    assert study.finetune is not None and len(study.seeds) == 26
    arms = study.finetune.arms
    demo = load_recipe(ROOT / "recipes/demo/orthogonal_variance.yaml", ["model.path=m"])
    section = study.finetune.recipe
    for name, settings in section.items():
        values = demo.to_mapping()[name]
        assert settings == {key: values[key] for key in settings}, name
    assert study.seeds[0] == demo.trainer["seed"]
    assert resolve_method(arms["ov"]) == demo.method
    baseline = load_recipe(ROOT / "recipes/demo/aux_loss.yaml", ["model.path=m"]).method
    assert baseline.terms == resolve_method(arms[EVEN]).terms
    for comparison in (c for effect in effects_of(study) for c in effect.comparisons):
        assert comparison.arm in arms
        balances = [resolve_method(arms[a]).terms["load_balance"].share
                    for a in (comparison.arm, comparison.baseline)]  # fmt: skip
        assert balances[0] == balances[1] or comparison.baseline == EVEN


def test_a_study_shows_the_effects_of_its_parts():
    both = load_miniature(SHIPPED.with_name("paper4.yaml"))
    assert [effect.number for effect in effects_of(both)] == [12, 13, 24]
    assert [effect.number for effect in effects_of(load_miniature(SHIPPED))] == list(range(1, 25))
    # What is the paper's stays so when the two files are edited.
    study = load_miniature(SHIPPED)
    assert (both.recovery, both.classification) == (study.recovery, study.classification)


def test_a_study_runs_and_goes_on_where_it_stopped(recipe, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(recipe(), output) == 0
    assert "| 12 | Diverse experts" in capsys.readouterr().out
    files = sorted(output.glob("shards/**/*.json"))
    assert len(files) == 6
    drawn = {path.name for path in (output / "pictures").iterdir()}
    epochs = {"figure3_epochs.png", "figure3_epochs.csv"}
    assert drawn == {"figure2.png", "figure3.png"} | epochs
    # Two arms, three metrics, two epochs and the start.
    assert len((output / "pictures" / "figure3_epochs.csv").read_text().splitlines()) == 1 + 18
    first = (output / "effects.json").read_text()
    times = {path: path.stat().st_mtime_ns for path in files}
    files[0].unlink()
    assert run(recipe(), output, resume=True) == 0
    times_after = {path: path.stat().st_mtime_ns for path in files}
    assert [path for path in files if times_after[path] != times[path]] == files[:1]
    assert (output / "effects.json").read_text() == first


def test_two_processes_share_a_study(recipe, tmp_path):
    path, output = recipe(classification=None), tmp_path / "out"
    run(path, output, part=(2, 2))
    assert [file.stem for file in output.glob("shards/**/*.json")] == ["seed_2"]
    run(path, output, resume=True, part=(1, 2))
    assert len(list(output.glob("shards/**/*.json"))) == 2
    with pytest.raises(RecipeError, match="--shard 3/2"):
        run(path, output, resume=True, part=(3, 2))


def test_a_failed_run_is_listed_and_tried_again(recipe, tmp_path, capsys):
    # Five features in four dimensions do not exist; the classification runs all the same.
    path, output = recipe(recovery={**RECOVERY, "width": 4}), tmp_path / "out"
    assert run(path, output) == 2
    said = capsys.readouterr().out
    assert "failed: recovery/sweep/seed_1: " in said and "width is 4; it must be at least" in said
    assert len(list(output.glob("shards/classification/**/*.json"))) == 4
    assert run(path, output, resume=True) == 2


def test_another_seed_joins_a_study_but_other_settings_do_not(recipe, tmp_path):
    output = tmp_path / "out"
    run(recipe(classification=None), output)
    run(recipe(classification=None, seeds=[1, 2, 3]), output, resume=True)
    assert len(list(output.glob("shards/**/*.json"))) == 3
    saved = json.loads((output / STUDY_FILE).read_text())
    saved["recovery"]["once"] = []  # before first_seeds
    (output / STUDY_FILE).write_text(json.dumps(saved))
    assert run(recipe(classification=None), output, resume=True) == 0
    with pytest.raises(RecipeError, match="other settings under recovery"):
        run(recipe(recovery={**RECOVERY, "trials": 4}), output, resume=True)


def test_a_damaged_result_is_named(recipe, tmp_path):
    output = tmp_path / "out"
    run(recipe(classification=None), output)
    broken = output / "shards" / "recovery" / "sweep" / "seed_1.json"
    broken.write_text(broken.read_text()[:40])
    with pytest.raises(RecipeError, match=r"seed_1\.json:1: not JSON .*; delete it"):
        run(recipe(classification=None), output, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds"),
        ({"clasification": {}}, "clasification"),
        ({"finetune": {"arms": {"a": {"preset": "orthogonal_varianc"}}}}, "did you mean"),
        ({"finetune": {"arms": {"a/b": {"preset": "none"}}}}, "may contain only letters"),
        ({"finetune": {"arms": {"a": {"preset": "none"}}, "first_seeds": {"b": 1}}}, "not among"),
        ({"finetune": {"arms": {"a": {}}, "baselines": {"a": "b"}}}, "baselines: .'b'. are not"),
        ({"classification": {"arms": ["dpp"], "setting": {"epoch": 3}}}, "'epochs'"),
        ({"scratch": {"arms": {"a": {}}, "mixture": {"prose": 3}}}, "'prose_rows'"),
        ({"scratch": {"arms": {"a": {"terms": {"variance": {"weight": -1}}}}}}, "weight"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(recipe, tmp_path, changes, message):
    output = tmp_path / "out"
    with pytest.raises(RecipeError, match=message):
        run(recipe(**changes), output)
    assert not output.exists()


def test_an_arm_runs_with_the_first_of_the_seeds(recipe):
    arms = {"all": {"preset": "none"}, "two": {"preset": "none"}, "one": {"preset": "none"}}
    finetune = {"arms": arms, "first_seeds": {"two": 2, "one": 1}}
    path = recipe(seeds=[7, 3, 5], recovery=None, classification=None, finetune=finetune)
    assert [(shard.arm, shard.seed) for shard in shards_of(load_miniature(path))] == [
        *(("all", 7), ("one", 7), ("two", 7)),
        *(("all", 3), ("two", 3)),
        ("all", 5),
    ]


def test_without_matplotlib_nothing_runs(recipe, tmp_path, monkeypatch):
    """The pictures come after hours of runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    strength = ROOT / "recipes" / "studies" / "strength.yaml"
    for study in (lambda: run(recipe(), tmp_path / "out"), lambda: run_strength(strength, "out")):
        with pytest.raises(DependencyError, match=r"pip install 'moe-finetune\[pictures\]'"):
            study()
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_runs(recipe):
    text = plan(recipe())
    assert "2  recovery" in text and "4  classification" in text and "6  runs in all" in text
    assert plan(recipe(), ["seeds=[7]"]).splitlines()[-1].split()[0] == "3"


def test_only_supervised_routing_gets_a_table():
    assert with_table({"preset": "erc"}, "t") == {"preset": "erc"}
    for method in (
        {"preset": "supervised_routing"},
        {"terms": {"supervised_routing": {"weight": 0.5}}},
    ):
        assert with_table(method, "t")["terms"]["supervised_routing"]["table"] == "t"


def test_other_files_are_no_miniature(tmp_path):
    path = tmp_path / "x.yaml"
    assert reproduction_of(path) is None
    path.write_text("seeds: [1]")
    assert reproduction_of(path) is None
    path.write_text(json.dumps({"kind": "miniature"}))
    assert reproduction_of(path).__name__ == REPRODUCTIONS["miniature"]
