"""GRPO's batches that teach nothing: completions whose rewards are all equal, or all None.

An advantage is a reward less the mean of its prompt's completions (Shao et al. 2024, eq. 4), so
these batches have a gradient of 0 by the policy's loss, and only a log's ``frac_reward_zero_std``
shows it.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)
_Trainer: Any = object
MANY = 10
"""Batches in a row without an advantage after which it is a fault of prompts or rewards."""


class NotesMissingSignal(_Trainer):
    """Mixin that warns of the first generated batch that teaches nothing, and of many in a row."""

    _in_a_row = 0
    _noted = False

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            size = output["advantages"].abs().sum()
            self._note(bool(self.accelerator.reduce(size, reduction="sum")))
        return output

    def _note(self, learns: bool) -> None:
        self._in_a_row = 0 if learns else self._in_a_row + 1
        rewards = ", ".join(self.reward_func_names)
        if self._in_a_row == 1 and not self._noted:
            self._noted = True
            log.warning(
                "step %d: nothing is learned from this batch: the completions of each prompt have "
                "equal rewards, or none (%s)",
                self.state.global_step + 1,
                rewards,
            )
        if self._in_a_row == MANY:
            log.warning(
                "step %d: nothing was learned from %d batches in a row: rewards (%s) never differ "
                "between the completions of a prompt; look at completions with "
                "trainer.log_completions: true, then give easier prompts, more "
                "trainer.num_generations, or another reward",
                self.state.global_step + 1,
                MANY,
                rewards,
            )
