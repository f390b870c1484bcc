"""Runs in processes of their own: killed, interrupted, failed, shared, under accelerate."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from moe_finetune.cli import main
from moe_finetune.errors import StudyError
from moe_finetune.io.children import Failure, failure
from moe_finetune.io.run_folder import read_log
from moe_finetune.study import load_results
from moe_finetune.study.recipe import LaunchSection
from moe_finetune.study.runner import starter

STUDY = [sys.executable, "-m", "moe_finetune.cli", "study"]


@pytest.fixture(scope="module")
def study_file(ingredients, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("study") / "small.yaml"
    values = {
        "base": ingredients,
        "axes": {"method": ["none", "aux_loss"]},
        "seeds": [1],
        "baseline": "none",
        "metrics": {"routing/max_violation": "lower"},
    }
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def wait_for(condition, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_study_ends_with_the_same_table(warm, study_file, tmp_path):
    whole = tmp_path / "whole"
    assert main(["study", str(study_file), "launch.kind=inline", "--output", str(whole)]) == 0
    killed = tmp_path / "killed"
    first = subprocess.Popen(
        [*STUDY, study_file, "--output", killed], start_new_session=True, stderr=subprocess.DEVNULL
    )
    second_run = killed / "runs" / "aux_loss" / "seed_1" / "recipe.yaml"  # the first of its files
    wait_for(second_run.exists)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    states = [run.state for run in load_results(killed).runs]
    assert states == ["finished", "started"]

    again = subprocess.run(
        [*STUDY, study_file, "--output", killed, "--resume"], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "none/seed_1: done already" in again.stderr
    for name in ("study.csv", "study.txt"):
        table = (killed / "tables" / name).read_text()
        assert table == (whole / "tables" / name).read_text(), name


@pytest.mark.slow
@pytest.mark.faults
def test_an_interrupt_stops_the_run_at_work_with_a_checkpoint(warm, study_file, tmp_path):
    output = tmp_path / "out"
    options = ["trainer.max_steps=100000", "evaluation=null"]
    study = subprocess.Popen([*STUDY, study_file, *options, "--output", output])
    wait_for((output / "runs" / "none" / "seed_1" / "metrics.jsonl").exists)
    study.send_signal(signal.SIGINT)
    assert study.wait(timeout=120) == 130
    checkpoints = list((output / "runs" / "none" / "seed_1" / "checkpoints").glob("checkpoint-*"))
    assert checkpoints
    states = [run.state for run in load_results(output).runs]
    assert states == ["started", "missing"]


@pytest.mark.slow
def test_failures_end_with_exit_code_1_and_their_reason(warm, ingredients, write_study, tmp_path):
    arms = {"bad": {"model": {"path": str(tmp_path / "gone")}}, "good": None}
    plain = {**ingredients, "evaluation": None, "export": {"merge": False}}
    file = write_study(
        {"base": plain, "axes": {"arm": arms}, "seeds": [1], "metrics": {"loss": "lower"}}
    )
    found = subprocess.run(
        [*STUDY, file, "--output", tmp_path / "out"], capture_output=True, text=True
    )
    assert found.returncode == 1
    recipe = tmp_path / "out" / "recipes" / "bad" / "seed_1.yaml"
    place = f"{recipe}:4: model.path: {tmp_path / 'gone'}"
    assert f"bad seed 1 is failed: {place}: no such folder" in found.stdout
    assert "1 of 2 runs finished" in found.stdout
    assert "Traceback" not in found.stderr


def test_reason_is_the_error_or_the_last_line(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("error: an old one\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("step 1\nerror: model.path: gone\nsecond line\n")
    assert failure(log, start, 2) == Failure("model.path: gone\nsecond line")
    log.write_text("loading\nsegmentation\n\n")
    assert failure(log, 0, -11) == Failure(f"killed by SIGSEGV: segmentation (log: {log})", True)
    assert "killed by SIGKILL (usually because memory ran out)" in failure(log, 0, -9).reason
    endless = failure(log, 0, -signal.SIGXCPU)
    assert "killed by SIGXCPU (usually because a chat template does not end)" in endless.reason
    assert not endless.machine  # to repeat it would not help
    log.write_text("")
    assert failure(log, 0, 3) == Failure(f"exit code 3: it printed nothing (log: {log})")


def test_accelerate_needs_its_configuration(tmp_path):
    with pytest.raises(StudyError, match=r"launch\.config: is missing"):
        starter(LaunchSection(kind="accelerate"))
    with pytest.raises(StudyError, match=r"launch.config: no file"):
        starter(LaunchSection(kind="accelerate", config="gone.yaml"), tmp_path)


def read_steps(run) -> list[int]:
    return [row["step"] for row in read_log(run.metrics_file) if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.faults
def test_two_processes_share_a_study(warm, ingredients, write_study, tmp_path):
    plain = {**ingredients, "evaluation": None, "export": {"merge": False}}
    axes = {"method": ["none", "aux_loss"]}
    file = write_study({"base": plain, "axes": axes, "seeds": [1, 2], "metrics": {"loss": "lower"}})
    command = [*STUDY, file, "--output", tmp_path / "out", "--resume"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    logs = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], logs
    begun = [line for text in logs for line in text.splitlines() if line.endswith(": begins")]
    assert len(begun) == len(set(begun)) == 4, logs
    for run in load_results(tmp_path / "out").runs:
        assert run.finished and read_steps(run) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_that_outlives_its_killed_study_is_waited_for(
    warm, ingredients, write_study, tmp_path
):
    plain = {**ingredients, "evaluation": None, "export": {"merge": False}}
    plain["trainer"] = {**plain["trainer"], "max_steps": 150, "save_steps": 1000}
    file = write_study({"base": plain, "seeds": [1], "metrics": {"loss": "lower"}})
    output = tmp_path / "out"
    command = [*STUDY, file, "--output", output, "--resume"]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for((output / "runs" / "base" / "seed_1" / "metrics.jsonl").exists)
    killed.kill()
    killed.wait()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "another process is running it" in again.stderr and "begins" not in again.stderr
    (run,) = load_results(output).runs
    assert read_steps(run) == list(range(1, 151))


@pytest.mark.slow
def test_a_run_under_accelerate_shows_its_steps(
    warm, ingredients, write_study, tmp_path, monkeypatch, capsys
):
    (tmp_path / "cpu.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 1\nuse_cpu: true\n"
    )
    for name in ("SILENT", "STATUS_EVERY", "EVERY"):  # before the process has begun, too
        monkeypatch.setattr(f"moe_finetune.io.terminal.{name}", 0.1)
    monkeypatch.setattr("moe_finetune.io.child_progress.EVERY", 0.1)
    plain = {**ingredients, "evaluation": None, "export": {"merge": False}}
    plain["trainer"] = {**plain["trainer"], "max_steps": 200, "save_steps": 1000}
    file = write_study(
        {
            "base": plain,
            "seeds": [1],
            "metrics": {"loss": "lower"},
            "launch": {"kind": "accelerate", "config": "cpu.yaml"},
        }
    )
    assert main(["study", str(file), "--output", str(tmp_path / "out")]) == 0
    (run,) = load_results(tmp_path / "out").runs
    assert run.finished and read_steps(run) == list(range(1, 201))
    steps = r"^seed_1: step \d+/200  loss \d\.\d+  [\d.]+ s left$"
    assert re.search(steps, capsys.readouterr().err, re.MULTILINE)
