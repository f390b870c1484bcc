"""SIGTERM and SIGINT: finish the step, save, and exit with code 130. A second one exits at once.

Batch systems send SIGTERM some seconds before they kill the job.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import newest_checkpoint, step_of

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """A run ended by a signal; the message names the checkpoint and how to continue."""


class StopOnSignal(TrainerCallback):
    """Turns the first signal into "save after this step and stop".

    Use it as a context manager around the whole training stage and as a callback of the trainer.
    Before the first step and after the last one a signal ends the run immediately.

    Args:
        output: the run folder, for the message.
        go_on: how to continue, if not by ``train --resume``.
        can_save: whether the step that has ended can be saved; otherwise the run stops with the
            last checkpoint.
    """

    def __init__(
        self, output: Path, go_on: str | None = None, can_save: Callable[[], bool] | None = None
    ):
        self.output = output
        self.can_save = can_save or (lambda: True)
        self.go_on = go_on or (
            "repeat the command with --resume "
            f"(moe-finetune train {RunFolder(output).recipe} --output {output} --resume)"
        )
        self._asked: signal.Signals | None = None
        self._in_steps = False
        self._stopping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for signal_number in SIGNALS:
                self._before[signal_number] = signal.signal(signal_number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._before.items():
            signal.signal(signal_number, handler)
        self._before = {}

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            os._exit(130)
        self._asked = signal.Signals(signal_number)
        if not self._in_steps:
            raise self._interrupted()
        terminal().say(
            f"{self._asked.name}: finishing this step and saving; a second signal stops the run "
            "at once",
            "warning",
        )

    def _interrupted(self, unsaved: int | None = None) -> Interrupted:
        message = self._message(unsaved)
        if ranks.rank() == 0:  # command-line frameworks swallow an interrupt's message
            terminal().say(message, "warning")
        return Interrupted(message)

    def _message(self, unsaved: int | None) -> str:
        name = self._asked.name if self._asked else "a signal on another rank"
        last, _ = newest_checkpoint(RunFolder(self.output).checkpoints)
        checkpoint = f"last checkpoint: {last}" if last else "no checkpoint was saved"
        if unsaved is not None:
            repeated = unsaved - (step_of(last) or 0 if last else 0)
            checkpoint += (
                f", because step {unsaved} is inside a generation batch; {repeated} "
                f"{'step is' if repeated == 1 else 'steps are'} done again"
            )
        return f"interrupted by {name}; {checkpoint}. To continue: {self.go_on}"

    # -- the trainer's events -----------------------------------------------------------------

    def on_step_begin(self, args, state, control, **kwargs):
        self._in_steps = True

    def on_step_end(self, args, state, control, **kwargs):
        # Ranks get the signal at different times, and have to stop at the same step.
        if ranks.any_rank(self._asked is not None):
            if not self.can_save():
                raise self._interrupted(state.global_step)
            self._stopping = True
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        # Leave from here: what the trainer does at the end of an epoch or of training would be
        # logged now and again after the resume.
        if self._stopping:
            raise self._interrupted()

    def on_train_end(self, args, state, control, **kwargs):
        self._in_steps = False
