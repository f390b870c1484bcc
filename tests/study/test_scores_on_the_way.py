"""`evaluation.every`: the model on its way is kept, scored once, and drawn for run and study."""

import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import yaml

from moe_finetune.evaluation.results import load_results, step_results
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.report.read_runs import read_run
from moe_finetune.run import lost_steps, plan_run, run_recipe
from moe_finetune.study import load_results as load_study_results
from moe_finetune.study import load_study, run_study
from moe_finetune.training.run.train import KeepSteps
from moe_finetune.training.save_and_resume.save_trained import save_trained
from tests.support import tiny
from tests.training.resume.harness import train


def base_of(ingredients: dict, **trainer) -> dict:
    constant = {"lr_scheduler_type": "constant", "save_total_limit": 1, **trainer}
    return {
        **ingredients,
        "trainer": {**ingredients["trainer"], **constant},
        "evaluation": {**ingredients["evaluation"], "every": 1, "limit": 3},
    }


@pytest.fixture(scope="module")
def finished(ingredients, tiny_checkpoint, tmp_path_factory):
    """Runs of three steps, and of one, which the longer ones come past."""
    whole = {
        "lora": None,
        "model": {"path": str(tiny_checkpoint("deepseek_v3")), "dtype": "bfloat16"},
    }
    values = {
        "base": base_of(ingredients),
        "axes": {
            "trained": {"adapter": {}, "whole": {**whole, "method": {"bias_update": 0.1}}},
            "length": {"long": {}, "short": {"trainer": {"max_steps": 1}}},
        },
        "seeds": [1],
        "benchmarks": ["colours"],
        "launch": {"kind": "inline"},
    }
    folder = tmp_path_factory.mktemp("scores")
    (folder / "study.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    run_study(load_study(folder / "study.yaml"), folder / "study")
    return folder / "study"


@pytest.mark.parametrize("trained", ["adapter", "whole"])
def test_what_is_scored_on_the_way_is_what_a_shorter_run_leaves(finished, trained):
    runs = {run.arm: run for run in load_study_results(finished).runs}
    long, short = runs[f"{trained}-long"], runs[f"{trained}-short"]
    on_the_way = step_results(long.folder)
    assert list(on_the_way) == [1, 2], "the end is the run's own"
    assert on_the_way[1]["checkpoint"]["sha256"] == short.evaluation["checkpoint"]["sha256"]
    hashes = {held["checkpoint"]["sha256"] for held in (*on_the_way.values(), long.evaluation)}
    assert len(hashes) == 3
    for task in ("sums", "colours"):
        end = long.evaluation["tasks"][task]["value"]
        curve = long.curve(f"scores/{task}")
        assert curve[1] == short.scores[task].value
        assert list(curve) == [1, 2, 3] and curve[3] == end
    states = RunFolder(long.folder).kept_steps().values()
    left = {path.name for state in states for path in state.path.iterdir()}
    assert left <= {"eval", "summary.json"}, "weights go once they are scored"
    assert RunFolder(short.folder).kept_steps() == {}


def test_runs_and_studies_draw_a_curve_for_each_task(finished):
    run = finished / "runs" / "adapter-long" / "seed_1"
    curves = read_run(run, "long").curves
    assert len(curves["scores/sums"].steps) == len(curves["scores/colours"].steps) == 3
    results = load_results(run / "eval")
    assert curves["scores/colours"].values[-1] == results["tasks"]["colours"]["value"]
    assert "colours over training steps" in (run / "report" / "index.html").read_text()
    page = (finished / "report" / "index.html").read_text()
    drawn = page[page.index("colours, %, over training steps") :].partition("</figure>")[0]
    assert re.findall(r"label&quot;: ?&quot;([a-z-]+)", drawn) == ["adapter-long", "whole-long"]
    assert "sums, %, over" not in page, "the study does not ask for it"


@pytest.mark.usefixtures("warm_server")
def test_a_killed_run_scores_each_state_once(ingredients, finished, tmp_path):
    file, run = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(base_of(ingredients, seed=1)))
    assert train(file, run, signal_at_step=2).code == -signal.SIGKILL
    assert list(RunFolder(run).kept_steps()) and not step_results(run)
    results = "eval/results.json"
    assert train(file, run, die_at=f"steps/2/{results}$").code == -signal.SIGKILL
    assert list(step_results(run)) == [1] and not (run / "report").exists()
    scored = run / "steps" / "1" / results
    kept = {path: path.stat().st_mtime_ns for path in (scored, run / "metrics.jsonl")}
    assert train(file, run).code == 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    straight = finished / "runs" / "adapter-long" / "seed_1"
    for step in (1, 2):
        ours, theirs = step_results(run)[step], step_results(straight)[step]
        assert ours["checkpoint"]["sha256"] == theirs["checkpoint"]["sha256"]


def test_scores_that_no_step_is_early_enough_for_are_said(ingredients, tmp_path, caplog):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(base_of(ingredients)))
    said = (
        "evaluation.every 3 is not less than the run's 3 steps; the run is scored only at its end"
    )
    plan_run(load_recipe(file), tmp_path / "run")
    assert said not in caplog.text
    plan_run(load_recipe(file, ["evaluation.every=3"]), tmp_path / "run")
    assert said in caplog.text


def test_a_state_that_cannot_be_written_does_not_end_the_training(ingredients, tmp_path, caplog):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**base_of(ingredients), "lora": None}))
    (tmp_path / "steps").write_text("in the way")
    recipe, model = load_recipe(file), tiny.model("olmoe")
    save = lambda folder: save_trained(model, tiny.tokenizer(), recipe, folder.path)  # noqa: E731
    keep = KeepSteps(recipe, RunFolder(tmp_path), save)
    keep.on_step_end(None, SimpleNamespace(global_step=2, max_steps=3), None)
    assert "the model after step 2 could not be kept and will not be scored" in caplog.text


def test_scores_that_a_full_disk_cost_are_named(ingredients, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished / "runs" / "adapter-long" / "seed_1", run)
    recipe = load_recipe(run / "recipe.yaml")
    assert lost_steps(recipe, RunFolder(run)) == []
    shutil.rmtree(run / "steps" / "2")  # as where it could not be written
    assert lost_steps(recipe, RunFolder(run)) == [2]
    run_recipe(recipe, run, resume=True)
    assert (
        "no scores after step 2: the model of that step could not be kept"
        in capsys.readouterr().err
    )
