"""The log that a run writes during training."""

import json
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from moe_finetune.io import write_atomic
from moe_finetune.io.run_folder import RunFolder, read_log

LOGS_OF_A_SHORT_RUN = 10


def logged_every(max_steps: int) -> int:
    """Steps between logs of a run shorter than its ``logging_steps``."""
    return max(1, max_steps // LOGS_OF_A_SHORT_RUN)


class RunLog(TrainerCallback):
    """Appends the trainer's logs, with tokens/s, to ``metrics.jsonl``.

    On a GPU, training rows also have ``peak_memory_gib``: the peak memory of tensors on rank 0's
    device since training began.
    """

    def __init__(self, output: Path):
        self.run = RunFolder(output)
        self.path = self.run.metrics
        self._tokens: float | None = 0.0
        self._time = 0.0
        self.tokens_per_second: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._time = time.perf_counter()
        self._tokens = None if state.global_step else 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if state.is_world_process_zero:
            # A run that begins again, before its first checkpoint, also repeats step 0.
            kept = state.global_step or -1
            for path in (self.run.metrics, self.run.routing_steps):
                drop_after(path, kept)

    def on_step_end(self, args, state, control, **kwargs):
        if args.logging_strategy == "no":
            return
        short = args.logging_strategy == "steps" and args.logging_steps > state.max_steps
        due = short and not state.global_step % logged_every(state.max_steps)
        if due or state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not state.is_world_process_zero:
            return
        now = time.perf_counter()
        tokens = logs.get("num_tokens")
        if "loss" in logs and tokens is not None and now > self._time:
            if self._tokens is not None and tokens > self._tokens:
                self.tokens_per_second = (tokens - self._tokens) / (now - self._time)
                logs["tokens_per_second"] = round(self.tokens_per_second, 1)
            self._tokens, self._time = tokens, now
        if "loss" in logs and torch.cuda.is_available():
            logs["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        evaluated = any(name.startswith("eval_") for name in logs)
        kind = "train" if "loss" in logs else "eval" if evaluated else "end"
        row = {"kind": kind, "step": state.global_step, **logs}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Delete rows of a run's log after ``step``; a resumed run writes them again."""
    if path.exists():
        rows = [r for r in read_log(path) if r["step"] <= step and r.get("kind") != "end"]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
