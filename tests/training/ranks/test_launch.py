"""A recipe through ``accelerate launch``: two processes on the CPU, top to bottom.

In the second way of two, each holds half of the experts.
"""

import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.support import tiny

pytestmark = pytest.mark.slow
STEPS, GLOBAL_BATCH = 8, 4
WHOLE, SPREAD = (), ("parallel.experts=2",)


@pytest.fixture(scope="module")
def recipe(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    tiny.save("qwen3_moe", folder / "base")
    # Of equal length: a mean over ranks of means over their tokens is then the mean over all.
    rows = [{"prompt": f"{n:02d} + 1 =", "completion": f" {n + 1:02d}"} for n in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "method": {
            "preset": "orthogonal_variance",
            # What depends on how a batch is cut is taken over all of it, or left out.
            "terms": {"load_balance": {"scope": "global_batch"}, "variance": {"weight": 0.0}},
        },
        "lora": {"rank": 4, "alpha": 8.0},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 32, "packing": False},
        "trainer": {
            "per_device_train_batch_size": GLOBAL_BATCH,
            "max_steps": STEPS,
            "save_steps": 1,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            # With 1e-8 Adam turns the rounding of a gradient near zero into a whole step.
            "adam_epsilon": 1e-5,
            "report_to": [],
            "disable_tqdm": True,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return folder / "recipe.yaml"


def start(recipe, output, processes, *more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--multi_gpu",
              "--mixed_precision", "no", "--main_process_port", str(port), "-m"]  # fmt: skip
    train = ["moe_finetune.cli", "train", str(recipe), *more, "--output", str(output)]
    batch = f"trainer.per_device_train_batch_size={GLOBAL_BATCH // processes}"
    return subprocess.Popen(
        [sys.executable, "-m", *(launch if processes > 1 else []), *train, batch],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process):
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text[-4000:]
    return text


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    """The same recipe by one process and, by way, by two."""
    folder = tmp_path_factory.mktemp("straight")
    finish(start(recipe, folder / "1", 1))
    for number, way in enumerate((WHOLE, SPREAD)):
        finish(start(recipe, folder / f"2-{number}", 2, *way))
    return folder / "1", {WHOLE: folder / "2-0", SPREAD: folder / "2-1"}


def rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def moments(run):
    return load_file(run / f"checkpoints/checkpoint-{STEPS}/trainer/optimizer.safetensors")


@pytest.mark.parametrize("way", [WHOLE, SPREAD], ids=["whole", "spread"])
def test_two_processes_make_the_run_of_one(straight, way):
    one, two = straight[0], straight[1][way]
    assert [row["step"] for row in rows(two)] == list(range(1, STEPS + 1))
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("loss", "losses/load_balance", "routing/max_violation"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
    weights = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    apart = max(float((weights[0][n] - weights[1][n]).abs().max()) for n in weights[0])
    assert apart < 1e-5
    assert {n: m.shape for n, m in moments(one).items()} == {
        n: m.shape for n, m in moments(two).items()
    }
    before = [json.loads((run / "routing/before.json").read_text()) for run in (one, two)]
    assert before[0]["load"] == before[1]["load"]
    for part in ("merged/config.json", "report/index.html", "routing/before.json",
                 "routing/after.json", "summary.json", "environment.json"):  # fmt: skip
        assert (two / part).is_file(), part
    ranks = sorted(file.name for file in (two / "checkpoints").glob("*/trainer/rank-*.safetensors"))
    assert set(ranks) == {"rank-00000.safetensors", "rank-00001.safetensors"}


def test_a_stopped_launch_resumes_to_the_same_adapter(recipe, straight, tmp_path):
    """Resumption with experts whole: ``test_other_ranks`` and ``test_output_on_ranks``."""
    run, whole = tmp_path / "run", straight[1][SPREAD]
    process = start(recipe, run, 2, *SPREAD)
    limit = time.monotonic() + 300
    while not (run / "checkpoints" / "checkpoint-2").is_dir():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    # The launcher gives its workers sessions of their own.
    for part in [*psutil.Process(process.pid).children(recursive=True), process]:
        part.kill()
    process.communicate()
    assert not (run / "adapter").exists()
    finish(start(recipe, run, 2, *SPREAD, "--resume"))
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()
    logged = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(run)]
    wanted = [{k: v for k, v in row.items() if k != "tokens_per_second"}
              for row in rows(whole)]  # fmt: skip
    assert logged == wanted
