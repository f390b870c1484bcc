"""An upcycle that was changed, damaged, killed, or run stage by stage goes on where it was."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import ROOT
from tests.upcycle.small import TRAINER, dense_of, run, weights, write_recipe


def made_at(output: Path) -> dict[str, int]:
    """When each step's mark was written."""
    marks = (output / "steps").glob("*.json")
    return {path.stem: path.stat().st_mtime_ns for path in marks if path.stem != "digests"}


@pytest.mark.slow
def test_what_is_done_is_kept_and_what_changed_is_done_again(copied, capsys):
    recipe, output = copied
    before = made_at(output)
    copy = output.parent / "dense copied"  # other times and another place, the same content
    shutil.copytree(dense_of(recipe), copy, copy_function=shutil.copyfile)
    moved = f"dense.path={copy}"
    assert run(capsys, "upcycle", recipe, moved, "--output", output, "--resume")[0] == 0
    assert made_at(output) == before
    assert (output / "curves/seed-0.expert-2/metrics.jsonl").read_text().count(
        '"kind": "train"'
    ) == 3
    other = ["upcycle", recipe, "router.trainer.max_steps=1", "--output", output, "--resume"]
    code, said = run(capsys, *other)
    assert code == 2 and "seed-0/router: made with other values of trainer" in said
    assert made_at(output) == before and "Nothing was deleted" in said
    code, _ = run(capsys, *other, "--replace")
    changed = {name for name, when in made_at(output).items() if before[name] != when}
    assert code == 0
    assert changed == {
        "seed-0.router",
        *(
            f"seed-0.{step}.{arm}"
            for step in ("arms", "measured")
            for arm in ("svmoe", "svmoe_balance")
        ),
    }
    assert run(capsys, "upcycle", recipe, "--output", output)[0] == 2, "without --resume"


@pytest.mark.slow
def test_a_removed_or_half_written_folder_is_made_again(copied, capsys):
    recipe, output = copied
    before = weights(output / "seed-0/merged")
    (output / "seed-0/merged/model.safetensors").unlink()
    (output / "steps/seed-0.merged.json").unlink()  # as a kill before the mark leaves it
    shutil.rmtree(output / "seed-0/measured/btx")
    assert run(capsys, "upcycle", recipe, "--output", output, "--resume")[0] == 0
    after = weights(output / "seed-0/merged")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (output / "seed-0/measured/btx/measured.json").is_file()


@pytest.mark.slow
def test_a_signal_ends_experts_that_train_side_by_side(warm, finished, tmp_path, capsys):
    dense = {"path": str(dense_of(finished[0])), "dtype": "float32"}
    trainer = {**TRAINER, "max_steps": 20, "save_steps": 1}
    changes = {"dense": dense, "clusters": {"count": 2}}
    recipe = write_recipe(tmp_path, **changes, experts={"trainer": trainer, "processes": 2})
    output, straight = tmp_path / "run", tmp_path / "straight"
    for stage in ("dense", "cluster"):
        stopped = ["upcycle", recipe, "--output", output, "--stage", stage, "--resume"]
        assert run(capsys, *(stopped if output.exists() else stopped[:-1]))[0] == 0
    shutil.copytree(output, straight)
    experts = ["--stage", "experts", "--resume"]
    command = [sys.executable, "-m", "moe_finetune.cli", "upcycle", str(recipe)]
    process = subprocess.Popen([*command, "--output", str(output), *experts], cwd=ROOT)
    work = output / "work/seed-0/experts"
    while process.poll() is None and not list(work.glob("*/checkpoints/checkpoint-*")):
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130 and len(children) >= 2
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left
    done = [path.name for path in (output / "seed-0").glob("experts/*")]
    assert len(done) < 2, "one that was left would have gone on to its end"
    assert list(work.glob("*/checkpoints/checkpoint-*"))
    recipe = write_recipe(tmp_path, **changes, experts={"trainer": trainer})  # one after the other
    assert run(capsys, "upcycle", recipe, "--output", straight, *experts)[0] == 0
    recipe = write_recipe(tmp_path, **changes, experts={"trainer": trainer, "processes": 2})
    assert run(capsys, "upcycle", recipe, "--output", output, *experts)[0] == 0
    for expert in ("0", "1"):
        ours, theirs = (weights(at / "seed-0/experts" / expert) for at in (output, straight))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stages_run_alone_and_say_what_they_miss(finished, tmp_path, capsys):
    recipe, whole = finished
    output = tmp_path / "run"
    code, said = run(capsys, "upcycle", recipe, "--output", output, "--stage", "merge")
    assert code == 2 and "run --stage" in said and "first" in said
    for stage in ("cluster", "experts", "merge"):
        arguments = ["upcycle", recipe, "--output", output, "--stage", stage, "--resume"]
        if stage == "experts":
            for expert in (2, 0, 1):
                assert run(capsys, *arguments, "--expert", expert)[0] == 0
        assert run(capsys, *arguments)[0] == 0
    assert not (output / "seed-0/router").exists()
    ours, theirs = weights(output / "seed-0/merged"), weights(whole / "seed-0/merged")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "whoever ran it, and when"
    code, said = run(
        capsys,
        "upcycle",
        recipe,
        "clusters.seed=1",
        "--output",
        output,
        "--stage",
        "merge",
        "--resume",
    )
    assert code == 2 and "is out of date; run --stage" in said
