"""A run's log: appended to ``metrics.jsonl``, and shown on a terminal as it grows."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import TrainerCallback

from moe_finetune.io import write_atomic
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.io.terminal import curve, duration, terminal
from moe_finetune.metrics.words import word

LOGS_OF_A_SHORT_RUN = 10
FEW_STEPS = 50
"""A shorter run logs every step unless the recipe says how often."""

_OBJECTIVES = ("reward", "rewards/accuracies", "rewards/margins", "loss")
_SHOWN = (
    *(head + name for name in _OBJECTIVES for head in ("", "eval_")),
    *("losses/", "routing/max_violation", "routing/entropy"),
)


def ordered(keys: Iterable[str]) -> list[str]:
    """Keys to show, in the order of the table."""
    names = list(keys)
    return [
        key
        for pattern in _SHOWN
        for key in names
        if key == pattern or (pattern.endswith("/") and key.startswith(pattern))
    ]


def name(key: str) -> str:
    """A logged value's name on a terminal."""
    if key.startswith("losses/"):
        return key.removeprefix("losses/").replace("_", " ")
    if key.removeprefix("eval_") in _OBJECTIVES and key != "loss":
        return word(key).name.lower()
    return {"loss": "loss", "routing/entropy": "entropy"}.get(key, word(key).name)


def number(value: float) -> str:
    """The value with four digits."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def logged_every(max_steps: int) -> int:
    """Steps between logs of a run shorter than its ``logging_steps``."""
    return max(1, max_steps // LOGS_OF_A_SHORT_RUN)


class RunLog(TrainerCallback):
    """Appends the trainer's logs, with tokens/s and a GPU's peak memory, to ``metrics.jsonl``.

    ``every_step_of_few``: log every step of a run of fewer than ``FEW_STEPS``.
    """

    def __init__(self, output: Path, every_step_of_few: bool = False):
        self.run, self.every_step_of_few = RunFolder(output), every_step_of_few
        self._tokens: float | None = 0.0
        self._time = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._time = time.perf_counter()
        self._tokens = None if state.global_step else 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if state.is_world_process_zero:
            self.run.note(max_steps=state.max_steps)
            # A run that begins again, before its first checkpoint, also repeats step 0.
            for path in (self.run.metrics, self.run.routing_steps):
                drop_after(path, state.global_step or -1)

    def on_step_end(self, args, state, control, **kwargs):
        if args.logging_strategy == "no":
            return
        short = args.logging_strategy == "steps" and args.logging_steps > state.max_steps
        due = short and not state.global_step % logged_every(state.max_steps)
        if self.every_step_of_few and args.logging_strategy == "steps":
            due = due or state.max_steps < FEW_STEPS
        if due or state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not state.is_world_process_zero:
            return
        now, tokens = time.perf_counter(), logs.get("num_tokens")
        if "loss" in logs and tokens is not None and now > self._time:
            if self._tokens is not None and tokens > self._tokens:
                speed = (tokens - self._tokens) / (now - self._time)
                logs["tokens_per_second"] = round(speed, 1)
            self._tokens, self._time = tokens, now
        if "loss" in logs and torch.cuda.is_available():
            logs["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        evaluated = any(key.startswith("eval_") for key in logs)
        kind = "train" if "loss" in logs else "eval" if evaluated else "end"
        row = {"kind": kind, "step": state.global_step, **logs}
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Delete rows of a run's log after ``step``; a resumed run writes them again."""
    if path.exists():
        rows = [r for r in read_log(path) if r["step"] <= step and r.get("kind") != "end"]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


class LiveTable(TrainerCallback):
    """Shows losses, routing, speed and time left, where transformers prints dictionaries."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._started, self._first, self._speed = 0.0, 0, ""

    def on_train_begin(self, args, state, control, **kwargs):
        self._started, self._first = time.monotonic(), state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            parts = (f"step {state.global_step}/{state.max_steps}", *self._pace(state))
            terminal().progress(state.global_step, state.max_steps, "  ".join(parts))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or not state.is_world_process_zero or "train_runtime" in logs:
            return
        numbers = {key: float(v) for key, v in logs.items() if isinstance(v, int | float)}
        if "tokens_per_second" in numbers:
            self._speed = f"{numbers['tokens_per_second']:,.0f} tokens/s"
        selected = {key: numbers[key] for key in ordered(numbers)}
        for key, value in selected.items():
            self._values[key].append(value)
        terminal().show(self._rows())
        if selected and terminal().style != "live":
            parts = [f"{name(key)} {number(value)}" for key, value in selected.items()]
            parts += self._pace(state) if "loss" in numbers else []
            terminal().say("  ".join([f"step {state.global_step}/{state.max_steps}", *parts]))

    def on_train_end(self, args, state, control, **kwargs):
        if terminal().style == "live" and state.is_world_process_zero:
            for row in self._rows():
                terminal().say(f"  {row[0]:<28} {row[1]:>9} -> {row[2]:>9}  {row[3]}")

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (name(key), number(values[0]), number(values[-1]), curve(values))
            for key, values in self._values.items()
        ]

    def _pace(self, state) -> list[str]:
        """Tokens per second and time left, as far as they are known."""
        parts, done = [self._speed] if self._speed else [], state.global_step - self._first
        if done > 0:
            seconds = (time.monotonic() - self._started) / done
            left = round(seconds * (state.max_steps - state.global_step), 1)
            parts += [f"{duration(left)} left"] if left else []
        return parts
