"""A loss or gradient that is not finite stops the run; a collapsed router is named."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from moe_finetune.errors import NumericsError
from moe_finetune.metrics.load import collapse_limit
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import newest_checkpoint

log = logging.getLogger(__name__)
_Trainer: Any = object

ROUTED_PER_EXPERT = 20
"""Selections per expert below which collapse is not judged: an expert may be unused by chance."""
DEAD_SHARE = 0.5
"""Share of experts without a token beyond which routing counts as collapsed."""
PATIENCE = 5
"""Consecutive logs beyond a limit before the warning."""


class FiniteTrainer(_Trainer):
    """Mixin that ends training at a loss or gradient that is not finite, before its update.

    The verdict is taken once per optimizer step, at its gradient norm, by all ranks together.
    """

    _finite = True
    state: Any
    args: Any

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self._finite = self._finite and bool(torch.isfinite(loss))
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
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
    """Warns once when routing stays collapsed: MaxVio of the worst layer, or dead experts.

    Args:
        callback: the SpecializationCallback whose values are read; it calls this one.
    """

    def __init__(self, callback: Any):
        self.callback = callback
        self._in_a_row = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        specialization = self.callback.specialization
        if (
            specialization is None
            or logs is None
            or "routing/max_violation_worst_layer" not in logs
        ):
            return
        facts = specialization.objective.facts
        routed = int(specialization.statistics.last_load_LE.sum(1).min())
        if routed < ROUTED_PER_EXPERT * facts.num_experts:
            return
        limit = collapse_limit(facts.num_experts, facts.top_k)
        violation = logs["routing/max_violation_worst_layer"]
        dead = logs["routing/dead_experts"] / facts.num_experts
        if violation <= limit and dead <= DEAD_SHARE:
            self._in_a_row = 0
            return
        self._in_a_row += 1
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
