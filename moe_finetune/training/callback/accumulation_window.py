"""How many micro-batches the current optimizer step has, which is what a loss is divided by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import ObjectiveError

if TYPE_CHECKING:
    from transformers import Trainer


class AccumulationWindow:
    """Reads the window from an attached trainer, or computes it; an epoch's last may be shorter."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self._steps = 1
        self._batches: int | None = None
        self._current = 1

    def begin(self, args: Any, dataloader: Any, state: Any) -> None:
        """Record the window at the start of training; detach a trainer of an earlier training."""
        self._steps = self._current = args.gradient_accumulation_steps
        self._batches = None
        if self.trainer is not None and self.trainer.state is not state:
            self.trainer = None
        if self.trainer is not None or self._steps == 1:
            return
        try:
            self._batches = len(dataloader)
        except TypeError:
            raise ObjectiveError(
                "gradient accumulation over data of unknown length: call "
                "callback.attach(trainer) so that the losses are scaled by the real window"
            ) from None
        per_epoch = math.ceil(self._batches / self._steps)
        if state.global_step % per_epoch:
            raise ObjectiveError(
                "resuming inside an epoch with gradient accumulation: call "
                "callback.attach(trainer) so that the losses are scaled by the real window"
            )

    def step(self, state: Any) -> None:
        if self._batches is not None:
            per_epoch = math.ceil(self._batches / self._steps)
            last = state.global_step % per_epoch == per_epoch - 1
            self._current = (last and self._batches % self._steps) or self._steps

    def scale(self) -> float:
        """1 / (micro-batches of the current step)."""
        if self.trainer is not None:
            return 1.0 / self.trainer.current_gradient_accumulation_steps
        return 1.0 / self._current
