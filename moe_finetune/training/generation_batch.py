"""Checkpoints inside a generation batch: the completions in use are saved and trained on.

TRL samples completions for several micro-batches at once, and GRPO may train on them several times.
A checkpoint can fall in between, and a resumed run must not sample new completions. It also needs
its epoch's order of prompts, which TRL's sampler draws from a generator that no checkpoint stores.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

_Trainer: Any = object
log = logging.getLogger(__name__)


class ResumesRollouts(_Trainer):
    """Mixin that saves and restores TRL's buffer of completions, one per rank."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        sampler.set_epoch = partial(_order_of_epoch, sampler)  # the Trainer calls it
        return sampler

    def rollout_state(self) -> dict[str, Any]:
        """This rank's place in its generation batch, and the completions it still trains on."""
        batches = None
        if self._step % self._micro_batches_of_a_rollout and self._buffered_inputs is not None:
            batches = [
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
                for batch in self._buffered_inputs
            ]
        return {"step": self._step, "batches": batches}

    def load_rollout_state(self, state: dict[str, Any] | None) -> None:
        """Continue with the completions of a checkpoint.

        Args:
            state: None when a different number of ranks wrote the checkpoint; each rank then
                samples completions of its prompts again.
        """
        if state is None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            if self._step % self._micro_batches_of_a_rollout:
                log.warning(
                    "the checkpoint is in the middle of a generation batch and comes from a "
                    "different number of processes; its completions are sampled again"
                )
            return
        self._step = state["step"]
        if state["batches"] is not None:
            device = self.args.device
            self._buffered_inputs = [
                {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                for batch in state["batches"]
            ]

    @property
    def _micro_batches_of_a_rollout(self) -> int:
        window = self.args.gradient_accumulation_steps
        return getattr(self.args, "steps_per_generation", window) * getattr(
            self, "num_iterations", 1
        )


def _order_of_epoch(sampler: Any, epoch: int) -> None:
    """Give a ``RepeatSampler`` the order that an uninterrupted run would have in ``epoch``."""
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
