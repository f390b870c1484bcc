"""What ends a run early or warns: numbers that are not finite, collapsed routing, a signal.

On SIGTERM or SIGINT a run finishes its step, saves, and exits with code 130; a second one exits at
once. Batch systems send SIGTERM some seconds before they kill the job.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from moe_finetune.errors import DataError, NumericsError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.metrics.routing import collapse_limit
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.training_state import newest_checkpoint, step_of

log = logging.getLogger(__name__)
_Trainer: Any = object

ROUTED_PER_EXPERT = 20
"""Selections per expert below which collapse is not judged: an expert may be unused by chance."""
DEAD_SHARE = 0.5
"""Share of experts without a token beyond which routing counts as collapsed."""
PATIENCE = 5
"""Consecutive logs beyond a limit before the warning."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class FiniteTrainer(_Trainer):
    """Mixin that ends training, on all ranks, at a loss or gradient that is not finite.

    The verdict comes once per optimizer step, before its update.
    """

    _finite = True
    state: Any
    args: Any

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self._finite = self._finite and bool(torch.isfinite(loss))
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if ranks.any_rank(not self._finite or not math.isfinite(float(norm))):
            newest, _ = newest_checkpoint(Path(self.args.output_dir))
            raise NumericsError(
                f"step {self.state.global_step + 1}: the loss or its gradient is not a finite "
                "number. Lower trainer.learning_rate or the weights under method.terms; last "
                f"good checkpoint: {newest or 'none'}"
            )
        return norm


class CollapseWatch(TrainerCallback):
    """Warns once when routing stays collapsed: MaxVio of the worst layer, or dead experts."""

    def __init__(self, callback: Any):
        self.callback = callback
        self._in_a_row = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        specialization = self.callback.specialization
        violation = (logs or {}).get("routing/max_violation_worst_layer")
        if specialization is None or violation is None:
            return
        facts = specialization.objective.facts
        routed = int(specialization.statistics.last_load_LE.sum(1).min())
        if routed < ROUTED_PER_EXPERT * facts.num_experts:
            return
        limit = collapse_limit(facts.num_experts, facts.top_k)
        dead = logs["routing/dead_experts"] / facts.num_experts
        collapsed = violation > limit or dead > DEAD_SHARE
        self._in_a_row = self._in_a_row + 1 if collapsed else 0
        if self._in_a_row == PATIENCE and state.is_world_process_zero:
            log.warning(
                "WARNING: routing has collapsed for %d logs up to step %d: worst layer's MaxVio "
                "%.2f (limit %.2f), experts without a token %.0f %% (limit %.0f %%). Raise "
                "method.terms.load_balance.weight, set method.bias_update: 1.0e-3, lower "
                "trainer.learning_rate, or freeze the router (router.train: frozen)",
                PATIENCE,
                state.global_step,
                violation,
                limit,
                100 * dead,
                100 * DEAD_SHARE,
            )


class EndsAsPlanned(TrainerCallback):
    """Notes whether a callback asked the trainer to stop; a run that just ends early has failed."""

    asked_at: int | None = None
    _epoch_from = 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._epoch_from = state.global_step

    def _note(self, args, state, control, **kwargs):
        # Of an epoch without a batch the Trainer itself sets the flag.
        if control.should_training_stop and self._epoch_from < state.global_step < state.max_steps:
            self.asked_at = state.global_step

    on_step_end = on_log = on_evaluate = on_save = on_epoch_end = _note

    def check(self, state: Any) -> None:
        """Report that a callback ended the run, or raise if nothing did."""
        if state.global_step >= state.max_steps:
            return
        if self.asked_at is None:
            raise DataError(
                f"training ended after step {state.global_step} of {state.max_steps}: the data "
                "loader has no more batches. Nothing was exported; lower trainer.max_steps or the "
                "batch size, or give more rows"
            )
        log.warning("a callback stopped training at step %d of %d", self.asked_at, state.max_steps)


class Interrupted(KeyboardInterrupt):
    """A run ended by a signal; the message names the checkpoint and how to continue."""


class StopOnSignal(TrainerCallback):
    """Turns the first signal into "save after this step and stop"; outside of steps it ends now.

    A context manager around the training stage, and a callback of the trainer. ``go_on``: how to
    continue, if not by ``train --resume``; ``can_save``: whether the step that has ended can be
    saved.
    """

    def __init__(
        self, output: Path, go_on: str | None = None, can_save: Callable[[], bool] | None = None
    ):
        self.run = RunFolder(output)
        self.can_save = can_save or (lambda: True)
        self.go_on = go_on or (
            "repeat the command with --resume "
            f"(moe-finetune train {self.run.recipe} --output {output} --resume)"
        )
        self._signal: signal.Signals | None = None
        self._in_steps = self._stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for signal_number in SIGNALS:
                self._handlers[signal_number] = signal.signal(signal_number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._handlers.items():
            signal.signal(signal_number, handler)
        self._handlers = {}

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(130)
        self._signal = signal.Signals(signal_number)
        if not self._in_steps:
            raise self._interrupted()
        terminal().say(
            f"{self._signal.name}: finishing this step and saving; a second signal stops the run "
            "at once",
            "warning",
        )

    def _interrupted(self, unsaved: int | None = None) -> Interrupted:
        """``unsaved``: the step that has ended, if it cannot be saved."""
        name = self._signal.name if self._signal else "a signal on another rank"
        last, _ = newest_checkpoint(self.run.checkpoints)
        checkpoint = f"last checkpoint: {last}" if last else "no checkpoint was saved"
        if unsaved is not None:
            repeated = unsaved - (step_of(last) or 0 if last else 0)
            checkpoint += (
                f", because step {unsaved} is inside a generation batch; {repeated} "
                f"{'step is' if repeated == 1 else 'steps are'} done again"
            )
        message = f"interrupted by {name}; {checkpoint}. To continue: {self.go_on}"
        if ranks.rank() == 0:  # command-line frameworks swallow an interrupt's message
            terminal().say(message, "warning")
        return Interrupted(message)

    # -- the trainer's events -----------------------------------------------------------------

    def on_step_begin(self, args, state, control, **kwargs):
        self._in_steps = True

    def on_step_end(self, args, state, control, **kwargs):
        # Ranks get the signal at different times, and have to stop at the same step.
        if ranks.any_rank(self._signal is not None):
            if not self.can_save():
                raise self._interrupted(state.global_step)
            self._stopping = control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        # Leave from here: what the trainer does at the end of an epoch or of training would be
        # logged now and again after the resume.
        if self._stopping:
            raise self._interrupted()

    def on_train_end(self, args, state, control, **kwargs):
        self._in_steps = False
