"""An upcycle that was changed, damaged, killed, or shared by processes goes on where it was."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.upcycle.small import (
    ARMS,
    TRAINER,
    dense_of,
    run,
    weights,
    write_recipe,
    write_suite,
)


def made_at(output: Path) -> dict[str, int]:
    """When each product's inputs were written."""
    notes = (output / "made").rglob("*.json")
    return {
        str(path.relative_to(output / "made").with_suffix("")): path.stat().st_mtime_ns
        for path in notes
        if path.stem != "digests"
    }


def check_equal(output: Path, other: Path) -> None:
    """Checkpoints, clusters and tables are equal to the byte."""
    files = [str(path.relative_to(other)) for path in other.glob("seed-*/**/model.safetensors")]
    assert len(files) > 4
    for file in (*files, "clusters/clusters.json", "tables.md"):
        assert (output / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.slow
def test_what_is_done_is_kept_and_what_changed_is_refused(copied, capsys):
    recipe, output = copied
    before = made_at(output)
    assert len(before) == 2 + 3 + 2 + 2 * len(ARMS)
    copy = output.parent / "dense copied"  # other times and another place, the same content
    shutil.copytree(dense_of(recipe), copy, copy_function=shutil.copyfile)
    moved = f"dense.path={copy}"
    assert run(capsys, "upcycle", recipe, moved, "--output", output, "--resume")[0] == 0
    assert made_at(output) == before
    log = (output / "curves/seed-0.expert-2/metrics.jsonl").read_text()
    assert log.count('"kind": "train"') == 3
    saved = (output / "recipe.yaml").read_bytes()
    other = ["upcycle", recipe, "router.trainer.max_steps=1", "--output", output, "--resume"]
    code, err = run(capsys, *other)
    assert code == 2 and "seed-0/router: made with other values of trainer" in err
    assert made_at(output) == before and "Nothing was deleted" in err
    assert (output / "recipe.yaml").read_bytes() == saved
    assert run(capsys, "upcycle", recipe, "--output", output)[0] == 2, "without --resume"
    added = ["arms.more={start: merged, trainer: {max_steps: 1}}", "--output", output, "--resume"]
    assert run(capsys, "upcycle", recipe, *added)[0] == 0
    after = made_at(output)
    assert set(after) - set(before) == {"seed-0/arms/more", "seed-0/measured/more"}
    assert "more:" in (output / "recipe.yaml").read_text()
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_questions_count_by_content(copied, capsys):
    recipe, output = copied
    shutil.rmtree(output / "seed-0/measured")
    command = ["upcycle", recipe, "--output", output, "--resume"]
    codes = []
    for name in ("one", "two", "other"):
        file = write_suite(output.parent / f"{name}.yaml", name != "other")
        override = f"evaluation.suite={file}"
        codes.append(run(capsys, *command[:2], override, *command[2:]))
    assert [code for code, _ in codes] == [0, 0, 2], codes
    assert "made with other values of suite" in codes[2][1]


@pytest.mark.slow
def test_a_removed_product_is_made_again(copied, capsys):
    recipe, output = copied
    before = weights(output / "seed-0/merged")
    for name in ("seed-0/merged", "seed-0/measured/btx"):
        shutil.rmtree(output / name)
    assert run(capsys, "upcycle", recipe, "--output", output, "--resume")[0] == 0
    after = weights(output / "seed-0/merged")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (output / "seed-0/measured/btx/measured.json").is_file()


def start(recipe: Path, output: Path, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "moe_finetune.cli", "upcycle", str(recipe), "--resume"]
    command += ["--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **options)


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_upcycle_ends_with_the_same_bytes(warm, finished, tmp_path, capsys):
    recipe, whole = finished
    output = tmp_path / "run"
    (output / "made").mkdir(parents=True)
    killed = 0
    for product in (
        "seed-0/experts/1",
        "seed-0/router",
        "seed-0/arms/btx",
        "seed-0/measured/svmoe",
    ):
        process = start(recipe, output)
        while process.poll() is None and not list((output / "work").glob(f"{product}-*")):
            time.sleep(0.02)
        assert process.poll() is None
        process.kill()
        process.communicate()
        killed += not (output / product).exists()
    assert killed >= 3  # otherwise the products appeared within a few milliseconds
    assert run(capsys, "upcycle", recipe, "--output", output, "--resume")[0] == 0
    check_equal(output, whole)
    assert not [path for path in (output / "work").rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.faults
def test_processes_of_two_gpus_share_an_upcycle(warm, finished, tmp_path):
    """Each names the device that it sees, makes some of the products, and none is made twice."""
    recipe, whole = finished
    output = tmp_path / "run"
    (output / "made").mkdir(parents=True)
    both = [start(recipe, output, CUDA_VISIBLE_DEVICES=str(gpu)) for gpu in (2, 5)]
    logs = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], logs
    made = [re.findall(r"(\S+): begins on CUDA_VISIBLE_DEVICES=(\d)", text) for text in logs]
    assert [{gpu for _, gpu in each} for each in made] == [{"2"}, {"5"}]
    names = [name for each in made for name, _ in each]
    assert len(names) == len(set(names)) == 2 + 3 + 2 + 2 * len(ARMS)
    check_equal(output, whole)


@pytest.mark.slow
@pytest.mark.faults
def test_sigterm_saves_what_trains(warm, finished, tmp_path, capsys):
    dense = {"path": str(dense_of(finished[0])), "dtype": "float32"}
    experts = {"trainer": {**TRAINER, "max_steps": 2000, "save_steps": 1000}}
    recipe = write_recipe(tmp_path, dense=dense, experts=experts)
    output = tmp_path / "run"
    (output / "made").mkdir(parents=True)
    process = start(recipe, output)
    while process.poll() is None and not list(output.glob("work/seed-0/experts/0-*/metrics.jsonl")):
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=120) == 130
    assert list(output.glob("work/seed-0/experts/0-*/checkpoints/checkpoint-*"))
    assert not (output / "seed-0/experts/0").exists()
