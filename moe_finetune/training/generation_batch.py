"""Checkpoints of GRPO fall between generation batches, so that no completions have to be saved.

TRL samples completions for several micro-batches at once, and GRPO may train on them several times.
A save inside waits for the end of the batch. Its order of prompts comes from a generator that no
checkpoint stores, and is drawn again for the epoch.
"""

import logging
from functools import partial
from typing import Any

import torch

_Trainer: Any = object
log = logging.getLogger(__name__)


class SavesBetweenGenerations(_Trainer):
    """Mixin that moves saves to the ends of TRL's generation batches."""

    _save_waits = False

    def can_save(self) -> bool:
        """Whether the next step samples new completions, or none follows."""
        window = self.args.gradient_accumulation_steps
        batch = getattr(self.args, "steps_per_generation", window)
        batch *= getattr(self, "num_iterations", 1)
        return self._step % batch == 0 or self.state.global_step >= self.state.max_steps

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        due = self._save_waits or self.control.should_save
        self.control.should_save = due and self.can_save()
        self._save_waits = due and not self.control.should_save
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            if not self.can_save():
                log.warning(
                    "the checkpoint is inside a generation batch, because its run ended there or "
                    "had another number of processes; the batch's completions are sampled again"
                )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        sampler.set_epoch = partial(_order_of_epoch, sampler)  # the Trainer calls it
        return sampler


def _order_of_epoch(sampler: Any, epoch: int) -> None:
    """Give a ``RepeatSampler`` the order that an uninterrupted run would have in ``epoch``."""
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
