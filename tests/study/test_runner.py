"""A study on the tiny checkpoint, end to end: runs, tables, what is skipped, resumed or refused."""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from moe_finetune.errors import CheckpointError, OutputExistsError, StudyError
from moe_finetune.io.run_folder import read_log
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.run import run_recipe
from moe_finetune.study import load_results, load_study, run_study, runner
from moe_finetune.study.folder import run_folder

ARMS = ["none", "aux_loss"]


@pytest.fixture(scope="module")
def study_file(ingredients, tmp_path_factory) -> Path:
    import yaml

    file = tmp_path_factory.mktemp("study") / "two_by_two.yaml"
    values = {
        "title": "Two methods",
        "base": ingredients,
        "axes": {"method": ARMS},
        "seeds": [1, 2],
        "baseline": "none",
        "metrics": {"routing/max_violation": "lower", "output_cosine": "lower"},
        "launch": {"kind": "inline"},
    }
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def finished(study_file, tmp_path_factory) -> Path:
    """The folder of a study that ran through; tests copy it before they change it."""
    output = tmp_path_factory.mktemp("finished") / "study"
    run_study(load_study(study_file), output)
    return output


def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def copied_runs(finished, monkeypatch) -> list[str]:
    """A run is a copy of its arm's finished one: what is tested is which of them are started."""
    started = []

    def start(run, output):
        started.append(run.name)
        made = finished / "runs" / run.arm / f"seed_{run.seed if run.seed in (1, 2) else 1}"
        shutil.copytree(made, run_folder(output, run.name).path, dirs_exist_ok=True)

    monkeypatch.setattr(runner, "starter", lambda *_: start)
    return started


def table_rows(output: Path) -> list[dict[str, str]]:
    with (output / "tables" / "study.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_run_is_an_ordinary_run_in_its_own_folder(finished):
    results = load_results(finished)
    assert [(run.arm, run.seed) for run in results.runs] == [
        ("none", 1), ("none", 2), ("aux_loss", 1), ("aux_loss", 2),
    ]  # fmt: skip
    for run in results.runs:
        assert run.finished and run.folder == finished / "runs" / run.arm / f"seed_{run.seed}"
        assert (run.merged / "config.json").is_file()
        assert [row["step"] for row in read_log(run.metrics_file) if row["kind"] == "train"] == [
            1,
            2,
            3,
        ]
        assert run.evaluation is not None and run.evaluation["complete"]
    seeds = [read_log(results.of("none")[i].metrics_file)[0]["loss"] for i in (0, 1)]
    assert seeds[0] != seeds[1], "the seed does not reach the run"


def test_table_holds_mean_and_spread_of_the_runs_own_results(finished):
    results = load_results(finished)
    rows = {(row["label"], row["column"]): row for row in table_rows(finished)}
    assert set(rows) == {
        (arm, column)
        for arm in ARMS
        for column in ("sums", "colours", "routing/max_violation", "output_cosine")
    }
    for arm in ARMS:
        found = [run.evaluation["tasks"]["colours"]["value"] for run in results.of(arm)]
        row = rows[arm, "colours"]
        assert float(row["mean"]) == pytest.approx(np.mean(found), abs=1e-12)
        assert float(row["std"]) == pytest.approx(np.std(found, ddof=1), abs=1e-12)
        logged = [
            read_log(run.metrics_file)[-2]["routing/max_violation"] for run in results.of(arm)
        ]
        violation = float(rows[arm, "routing/max_violation"]["mean"])
        assert violation == pytest.approx(np.mean(logged), abs=1e-12)
        after = [
            json.loads((run.folder / "routing/after.json").read_text()) for run in results.of(arm)
        ]
        cosine = np.mean([shot["metrics"]["output_cosine"]["mean"] for shot in after])
        assert float(rows[arm, "output_cosine"]["mean"]) == pytest.approx(cosine, abs=1e-12)
    assert rows["none", "colours"]["test"] == ""
    assert rows["aux_loss", "colours"]["test"] == "seeds and items"
    assert rows["aux_loss", "output_cosine"]["test"] == "paired t"
    page = (finished / "report" / "index.html").read_text()
    assert "Two methods" in page and "aux_loss" in page


def test_finished_runs_are_skipped(study_file, finished, tmp_path):
    output = copy(finished, tmp_path)
    stamps = {f: f.stat().st_mtime_ns for f in output.glob("runs/*/*/summary.json")}
    before = table_rows(output)
    assert len(stamps) == 4
    with pytest.raises(OutputExistsError, match="--resume"):
        run_study(load_study(study_file), output)
    run_study(load_study(study_file), output, resume=True)
    assert {f: f.stat().st_mtime_ns for f in output.glob("runs/*/*/summary.json")} == stamps
    assert table_rows(output) == before


def test_a_seed_that_is_added_is_all_that_runs(study_file, finished, copied_runs, tmp_path):
    output = copy(finished, tmp_path)
    stamps = {f: f.stat().st_mtime_ns for f in output.glob("runs/*/*/summary.json")}
    results = run_study(load_study(study_file, ["seeds=[1,2,5]"]), output, resume=True)
    assert len(results.finished) == 6 and copied_runs == ["none/seed_5", "aux_loss/seed_5"]
    assert {f: f.stat().st_mtime_ns for f in stamps} == stamps


def test_a_run_of_another_recipe_is_refused_before_anything_starts(study_file, finished, tmp_path):
    output = copy(finished, tmp_path)
    shutil.rmtree(output / "runs" / "none" / "seed_1")
    with pytest.raises(StudyError, match=r"seed_2: was made with a different recipe"):
        run_study(load_study(study_file, ["trainer.max_steps=4"]), output, resume=True)
    assert not (output / "runs" / "none" / "seed_1").exists()


@pytest.mark.parametrize("damage", ["changed", "samples", "missing", "record"])
def test_a_damaged_finished_run_is_refused_by_name(study_file, finished, tmp_path, damage):
    output = copy(finished, tmp_path)
    run = output / "runs" / "aux_loss" / "seed_2"
    if damage == "changed":
        file = run / "eval" / "results.json"
        file.write_text(file.read_text().replace("0.", "1.", 1))
    elif damage == "samples":
        file = next(run.glob("eval/tasks/*/samples.jsonl"))
        file.write_text(file.read_text().replace("0", "1", 1))
    elif damage == "missing":
        (run / "metrics.jsonl").unlink()
    else:
        (run / "summary.json").write_text("{")
    error = CheckpointError if damage == "record" else StudyError
    with pytest.raises(error, match=str(run)):
        load_results(output)
    if damage != "record":
        with pytest.raises(error, match=str(run)):
            run_study(load_study(study_file), output, resume=True)


def test_a_run_that_works_again_is_not_finished_until_its_end(finished, tmp_path, monkeypatch):
    run = run_folder(copy(finished, tmp_path), "none/seed_1")
    monkeypatch.setattr("moe_finetune.run.evaluate", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_recipe(load_recipe(run.recipe), run.path, resume=True)
    assert not run.finished
    monkeypatch.undo()
    run_recipe(load_recipe(run.recipe), run.path, resume=True)
    assert run.finished


def test_a_folder_with_other_files_is_left_alone(study_file, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(OutputExistsError, match="other files"):
        run_study(load_study(study_file), tmp_path, resume=True)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failed_run_is_listed_and_the_rest_go_on(ingredients, write_study, tmp_path):
    data = tmp_path / "late.jsonl"
    study = load_study(
        write_study({
            "base": {**ingredients, "evaluation": None, "export": {"merge": False}},
            "axes": {"data": {
                "absent": {"data": {"train": str(data)}},
                "present": None,
            }},
            "seeds": [3],
            "metrics": {"loss": "lower"},
            "launch": {"kind": "inline"},
        })
    )  # fmt: skip
    output = tmp_path / "out"
    results = run_study(study, output)
    states = {run.arm: run.state for run in results.runs}
    assert states == {"absent": "failed", "present": "finished"}
    assert str(data) in results.runs[0].reason
    assert (
        f"absent seed 3 is failed: no data file or folder {data}"
        in (output / "tables" / "study.txt").read_text()
    )
    shutil.copy(ingredients["data"]["train"], data)
    results = run_study(study, output, resume=True)
    assert [run.state for run in results.runs] == ["finished", "finished"]
    assert results.runs[0].reason == ""


@pytest.mark.usefixtures("copied_runs")
def test_a_finished_run_gives_up_what_is_to_be_discarded(study_file, finished, tmp_path):
    output = copy(finished, tmp_path)
    before = table_rows(output)
    study = load_study(study_file, ["discard=[merged, checkpoints]", "seeds=[1,2,6]"])
    results = run_study(study, output, resume=True)
    assert len(results.finished) == 6
    for run in results.runs:
        kept = {path.name for path in run.folder.iterdir()}
        assert {"adapter", "eval", "routing"} <= kept and not {"merged", "checkpoints"} & kept
    again = run_study(load_study(study_file, ["discard=[merged]"]), output, resume=True)
    assert len(again.finished) == 4 and table_rows(output) == before


def test_shards_share_a_folder(study_file, finished, copied_runs, tmp_path):
    output = tmp_path / "out"
    study = load_study(study_file)
    first = run_study(study, output, shard=(1, 2))
    assert [run.name for run in first.finished] == ["none/seed_1", "aux_loss/seed_1"]
    second = run_study(study, output, shard=(2, 2))
    assert len(second.finished) == 4
    assert copied_runs[2:] == ["none/seed_2", "aux_loss/seed_2"]
    assert table_rows(output) == table_rows(finished)
    with pytest.raises(StudyError, match="shard 3/2"):
        run_study(study, output, shard=(3, 2))
