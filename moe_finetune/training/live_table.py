"""The live table of training: losses, routing, speed and time left, at every log."""

import time
from collections import defaultdict

from transformers import TrainerCallback

from moe_finetune.io.terminal import curve, duration, terminal
from moe_finetune.metrics.shown import name, number, ordered


class LiveTable(TrainerCallback):
    """Replaces transformers' progress bars and printed dictionaries on the main process."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._started = 0.0
        self._first = 0
        self._speed = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self._started, self._first = time.monotonic(), state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            terminal().progress(state.global_step, state.max_steps, self._note(state))

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
        if not selected:
            return
        numbers_text = "  ".join(f"{name(key)} {number(value)}" for key, value in selected.items())
        text = f"step {state.global_step}/{state.max_steps}  {numbers_text}"
        if "loss" in numbers:
            text += "".join(f"  {part}" for part in (self._speed, self._left(state)) if part)
        if terminal().style != "live":
            terminal().say(text)

    def on_train_end(self, args, state, control, **kwargs):
        if terminal().style == "live" and state.is_world_process_zero and self._values:
            for row in self._rows():
                terminal().say(f"  {row[0]:<28} {row[1]:>9} -> {row[2]:>9}  {row[3]}")

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (name(key), number(values[0]), number(values[-1]), curve(values))
            for key, values in self._values.items()
        ]

    def _note(self, state) -> str:
        parts = (f"step {state.global_step}/{state.max_steps}", self._speed, self._left(state))
        return "  ".join(part for part in parts if part)

    def _seconds_left(self, state) -> float | None:
        done = state.global_step - self._first
        if done <= 0:
            return None
        passed = time.monotonic() - self._started
        return round(passed / done * (state.max_steps - state.global_step), 1)

    def _left(self, state) -> str:
        seconds = self._seconds_left(state)
        return f"{duration(seconds)} left" if seconds else ""
