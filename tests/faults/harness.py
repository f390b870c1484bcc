"""Train tiny models in processes that can be killed, many times, without importing each time.

A server process imports everything once and forks a child for every run. ``python -m
tests.faults.harness`` is that server: one JSON line in, the child's pid and its exit status out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AUDIT = "moe_finetune.checkpoint"
STEPS, SAVE_STEPS = 9, 2
METHODS = {
    "qwen3_moe": {
        "preset": "specialization_coupling",
        "terms": {"coupling": {"weight": 0.1, "pairing": "transition"}},
    },
    "moonlight": {"preset": "loss_free"},
    "deepseek_v2": {"preset": "orthogonal_variance"},
}


def write_inputs(family: str, folder: Path) -> Path:
    """A tiny checkpoint, data and a recipe that uses dropout, accumulation and several epochs."""
    from tests import tiny

    tiny.save(family, folder / "base")
    rows = [
        {"prompt": f"What is {i} plus {7 * i}?", "completion": f" It is {8 * i}." + " x" * (i % 5)}
        for i in range(15)
    ]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = {
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "method": METHODS[family],
        "lora": {"rank": 4, "alpha": 16.0, "dropout": 0.1},
        "data": {"train": str(data), "max_length": 48},
        "trainer": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,  # 4 steps an epoch, the last of 2 + 2 + 2 + 2 (1)
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "logging_steps": 3,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "report_to": [],
            "disable_tqdm": True,
        },
        "export": {"merge": False},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def adapter_hash(run: Path) -> str:
    """SHA-256 of the trained adapter's weights."""
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def logged(run: Path) -> list[dict]:
    """Rows of ``metrics.jsonl`` without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
        row.pop("peak_memory_gib", None)
    return [row for row in rows if row["kind"] != "end"]


@dataclass
class Child:
    """A finished run: exit code, or minus the signal that ended it, and what it wrote."""

    code: int
    text: str


class Server:
    """The process that forks runs."""

    def __init__(self, log: Path):
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.harness"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._answer() == "ready"

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def train(
        self,
        recipe: Path,
        run: Path,
        *,
        die_at_event: int | None = None,
        signal_after: float | None = None,
        signal_at_step: int | None = None,
        number: int = signal.SIGKILL,
    ) -> Child:
        """``moe-finetune train`` with ``--resume`` when the run exists.

        Args:
            recipe: the recipe's file.
            run: the run's folder.
            die_at_event: SIGKILL at that part of a save, counted over the run.
            signal_after: send ``number`` after so many seconds.
            signal_at_step: send ``number`` to itself at the end of that step.
            number: the signal.
        """
        argv = ["train", str(recipe), "--output", str(run)]
        if (run / "recipe.yaml").exists():
            argv.append("--resume")
        order = {
            "argv": argv,
            "log": str(self.log),
            "event": die_at_event,
            "step": signal_at_step,
            "signal": int(number),
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self._answer())
        timer = None
        if signal_after is not None:
            timer = threading.Timer(signal_after, _send, (pid, number))
            timer.start()
        code = int(self._answer())
        if timer is not None:
            timer.cancel()
        return Child(code, self.log.read_text(encoding="utf-8", errors="replace"))

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        assert line, "the server died"
        return line.strip()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _serve() -> None:
    import sklearn.manifold  # noqa: F401
    import torch
    import tqdm
    import trl  # noqa: F401

    import moe_finetune.report
    import moe_finetune.training.trainer  # noqa: F401
    from moe_finetune.cli import main

    torch.set_num_threads(1)
    # tqdm's own lock is shared between processes: a run killed while it holds it would stop the
    # runs forked after it.
    tqdm.tqdm.set_lock(threading.RLock())
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(order, main)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(order: dict, main) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["event"] is not None:
        _die_at(order["event"])
    if order["step"] is not None:
        _signal_at(order["step"], order["signal"])
    code = 99
    try:
        code = main(order["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_at(count: int) -> None:
    seen = 0

    def hook(event: str, _: tuple) -> None:
        nonlocal seen
        if event == AUDIT:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _signal_at(step: int, number: int) -> None:
    from moe_finetune.training.callback import SpecializationCallback

    before = SpecializationCallback.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        before(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), number)

    SpecializationCallback.on_step_end = on_step_end


if __name__ == "__main__":
    _serve()
