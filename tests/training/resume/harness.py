"""Train tiny models in processes that can be killed, many times, without importing each time.

``python -m tests.training.resume.harness ORDER`` is such a process.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moe_finetune import cli
from tests.support.warm import Popen

ROOT = Path(__file__).resolve().parents[3]
STEPS, SAVE_STEPS = 9, 2
SAVED = r"/checkpoints/checkpoint-\d+"
SAVE = (
    f"os.mkdir .*{SAVED}$",
    f"{SAVED}/adapter_config.json$",
    f"{SAVED}/trainer/rank-00000.safetensors$",
    f"{SAVED}/trainer_state.json$",
    f"{SAVED}/manifest.json$",
    r"open .*/checkpoints$",  # synced after the manifest
)
"""Places in a save, in order: audit event and path of what comes next."""
METHODS = {
    "qwen3_moe": {
        "preset": "specialization_coupling",
        "terms": {"specialization": {"share": 0.1, "every": 2}, "coupling": {"weight": 0.1}},
    },
    "deepseek_v3": {"preset": "loss_free"},
    "deepseek_v2": {"preset": "orthogonal_variance"},
}


def write_inputs(family: str, folder: Path) -> Path:
    """A tiny checkpoint, data and a recipe that uses dropout, accumulation and several epochs."""
    from tests.support import tiny

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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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


def train(
    recipe: Path,
    run: Path,
    *,
    die_at: str | None = None,
    signal_after: float | None = None,
    signal_at_step: int | None = None,
    number: int = signal.SIGKILL,
) -> Child:
    """``moe-finetune train`` with ``--resume`` when the run exists; ``warm_server`` forks it.

    Args:
        recipe: the recipe's file.
        run: the run's folder.
        die_at: SIGKILL at the first audit event and path that this pattern matches.
        signal_after: send ``number`` after so many seconds.
        signal_at_step: send ``number`` to itself at the end of that step.
        number: the signal.
    """
    argv = ["train", str(recipe), "--output", str(run)]
    if (run / "recipe.yaml").exists():
        argv.append("--resume")
    order = {"argv": argv, "die_at": die_at, "step": signal_at_step, "signal": int(number)}
    command = [sys.executable, "-m", "tests.training.resume.harness", json.dumps(order)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if signal_after is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(signal_after)
            process.send_signal(number)
        code = process.wait()
        log.seek(0)
        return Child(code, log.read())


def main(order: dict) -> int:
    """What the process does."""
    if order["die_at"] is not None:
        _die_at(order["die_at"])
    if order["step"] is not None:
        _signal_at(order["step"], order["signal"])
    return cli.main(order["argv"])


def _die_at(pattern: str) -> None:
    paths = {"open": 0, "os.mkdir": 0, "os.rename": 1}  # which argument of the audit event

    def hook(event: str, arguments: tuple) -> None:
        if event in paths and re.search(pattern, f"{event} {arguments[paths[event]]}"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _signal_at(step: int, number: int) -> None:
    from moe_finetune.training.callback.callback import SpecializationCallback

    before = SpecializationCallback.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        before(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), number)

    SpecializationCallback.on_step_end = on_step_end


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
