"""What runs in other processes are doing: step, loss and time left, from their metrics.jsonl."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import duration, terminal

EVERY = 1.0
"""Seconds between looks at the files."""
_TAIL = 1 << 16
"""Bytes at the end of a file that are read."""


class RunProgress:
    """The progress of a run, or of another command, from the files that it writes from now on; its
    process prints into ``log``.
    """

    def __init__(self, run: RunFolder, log: Path):
        self.run, self.log = run, log
        self._since = time.time()
        self._first: tuple[int, float] | None = None

    def text(self) -> str:
        """Step, loss and time left; before and after training the last line of the log."""
        row, written = self._last_row()
        if row is None or self.run.trained:
            return self._last_line(self.log) or "starts"
        step, total = int(row["step"]), self._max_steps()
        if self._first is None:
            self._first = step, written
        parts = [f"step {step}/{total}" if total else f"step {step}", f"loss {row['loss']:.4g}"]
        if total and step > self._first[0]:
            seconds = (written - self._first[1]) / (step - self._first[0]) * (total - step)
            parts += [f"{duration(seconds)} left"]
        return "  ".join(parts)

    def _last_row(self) -> tuple[dict[str, Any] | None, float]:
        """The last logged row of training, and when the log was written."""
        text, written = self._tail(self.run.metrics)
        for line in reversed(text.split("\n")[:-1]):  # the last one may be incomplete
            with suppress(ValueError):  # the first one, too
                row = json.loads(line)
                if isinstance(row, dict) and "loss" in row and "step" in row:
                    return row, written
        return None, written

    def _last_line(self, file: Path) -> str:
        lines = self._tail(file)[0].replace("\r", "\n").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _tail(self, file: Path) -> tuple[str, float]:
        """The end of a file and its time; empty if it was not written since the start."""
        try:
            with file.open("rb") as stream:
                written = file.stat().st_mtime
                if written < self._since:
                    return "", written
                stream.seek(max(0, file.stat().st_size - _TAIL))
                return stream.read().decode("utf-8", "replace"), written
        except OSError:
            return "", 0.0

    def _max_steps(self) -> int:
        with suppress(Exception):  # another process may be replacing the file
            return int(self.run.read_summary().get("max_steps", 0))
        return 0


class Watch:
    """Shows the progress of several runs on the terminal when it is called."""

    def __init__(self, runs: Sequence[RunProgress]):
        self.runs, self._shown = runs, 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._shown >= EVERY:
            self._shown = time.monotonic()
            terminal().status([f"{run.run.path.name}: {run.text()}" for run in self.runs])
