"""Detect losses and gradients that are not finite, diverged models and routing collapse."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback

from moe_finetune.errors import NumericsError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics.load import collapse_limit
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import checkpoints, newest_checkpoint, step_of

if TYPE_CHECKING:
    from moe_finetune.training.callback import SpecializationCallback
    from moe_finetune.training.specialization import Specialization

log = logging.getLogger(__name__)

ROUTED_PER_EXPERT = 20
"""Selections per expert below which collapse is not judged: an expert may be unused by chance."""


STILL_STEPS = 5
"""Consecutive steps without learning after which the run stops."""
STILL_NORM = 1e-5
"""Share of the first step's gradient norm below which a gradient counts as vanished."""


def make_deterministic() -> None:
    """Refuse every operation that is not deterministic. Call it before the model is built.

    The toolkit's own operations are deterministic anyway; attention kernels and others may not be.
    Training is slower.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


class NumericsGuard(TrainerCallback):
    """Checks loss and gradient of every step, and stops the run or skips the step.

    A diverged model gives the same answer to everything: its gradient vanishes while the loss stays
    high, or the loss returns to that of random guessing. Either one, five steps in a row, stops the
    run.

    A skipped step changes nothing: no weight, moment, running table or routing bias. Its token ids,
    loss, gradient norm and each term's value by layer are written to ``bad_batches.jsonl``.

    Args:
        on_nan: "stop" or "skip".
        learns: whether the loss measures learning; a policy gradient's does not and stays near 0.
    """

    def __init__(
        self,
        output: Path,
        on_nan: Literal["stop", "skip"],
        callback: SpecializationCallback,
        learns: bool = True,
    ):
        self.run = RunFolder(output)
        self.on_nan = on_nan
        self.callback = callback
        self.learns = learns
        self.skipped = 0
        self._batches: list[dict[str, Any]] = []
        self._terms: list[tuple[int, dict[str, Tensor]]] = []
        self._bad = False
        self._held: dict[str, Any] | None = None
        self._watched: Specialization | None = None
        self._first: tuple[float, float] | None = None
        self._learned = False
        self._still = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self._batches, self._terms, self._bad = [], [], False
        specialization = self.callback.specialization
        if specialization is not None and specialization is not self._watched:
            specialization.recorder.add_observer(self._observe)
            self._watched = specialization
        if specialization is not None and self.on_nan == "skip":
            self._held = specialization.snapshot()

    def _observe(self, record: RoutingRecord, loss: LayerLoss) -> None:
        self._terms.append((record.layer, loss.values))

    def batch(self, inputs: Any, loss: Tensor) -> Tensor:
        """Record one micro-batch; return the loss to log (0 for a bad one that is skipped)."""
        # A trainer that generates gets rows, and makes their ids itself.
        ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
        self._batches.append({"input_ids": ids, "loss": loss.detach()})
        if bool(torch.isfinite(loss)):
            return loss
        self._bad = True
        return torch.zeros_like(loss) if self.on_nan == "skip" else loss

    def leaves_out(self, model: torch.nn.Module, step: int, norm: float) -> bool:
        """Whether to skip the window's update, given the gradients' norm on this rank.

        Raises:
            NumericsError: a value is not finite and ``on_nan`` is "stop", or the model has
                diverged.
        """
        bad = ranks.any_rank(self._bad or not math.isfinite(norm))
        if bad:
            self._write(step, norm)
            if self.on_nan == "stop":
                raise NumericsError(self._message(step))
            log.warning(
                "step %d is skipped because its loss or gradient is not finite; see %s",
                step,
                self.run.bad_batches,
            )
            self.skipped += 1
            # Without a gradient the optimizer skips a parameter and its moments.
            for parameter in model.parameters():
                parameter.grad = None
            if self._watched is not None and self._held is not None:
                self._watched.go_back(self._held)
        elif ranks.any_rank(self.learns and self._runs_away(norm)):
            self._write(step, norm)
            raise NumericsError(self._run_away(step, norm))
        self._batches, self._terms, self._held = [], [], None
        return bad

    def _runs_away(self, norm: float) -> bool:
        """Whether nothing was learned in the last :data:`STILL_STEPS` steps."""
        loss = self._loss()
        if self._first is None:
            self._first = loss, norm
        first_loss, first_norm = self._first
        facts = self._watched.objective.facts if self._watched is not None else None
        guess = math.log(facts.vocab_size) if facts is not None else math.inf
        still = norm <= STILL_NORM * first_norm and loss > 0.5 * first_loss
        guesses = self._learned and loss > 0.999 * guess
        self._learned |= loss < 0.9 * guess < math.inf
        self._still = self._still + 1 if still or guesses else 0
        return self._still >= STILL_STEPS

    def _loss(self) -> float:
        return sum(float(batch["loss"]) for batch in self._batches)

    def _run_away(self, step: int, norm: float) -> str:
        assert self._first is not None
        root = self.run.checkpoints
        good = [p for p in checkpoints(root) if (step_of(p) or 0) <= step - STILL_STEPS]
        return (
            f"step {step}: training has collapsed: the loss has been {self._loss():.4g} for "
            f"{STILL_STEPS} steps without learning (gradient norm {norm:.1e}; at the first step "
            f"{self._first[1]:.1e}, loss {self._first[0]:.4g}). Lower trainer.learning_rate or "
            "the weights under method.terms, or add trainer.warmup_steps; last checkpoint "
            f"before it: {good[0] if good else 'none'}"
        )

    def _message(self, step: int) -> str:
        last, _ = newest_checkpoint(self.run.checkpoints)
        return (
            f"step {step}: the loss or its gradient is not a finite number; the batch and the "
            f"terms' values are in {self.run.bad_batches}. Lower trainer.learning_rate or the "
            "weights under method.terms, or skip such steps (numerics.on_nan: skip); last good "
            f"checkpoint: {last or 'none'}"
        )

    def _write(self, step: int, norm: float) -> None:
        values: dict[str, dict[str, float]] = {}
        for layer, terms in self._terms:
            for name, value in terms.items():
                values.setdefault(name, {})[str(layer)] = float(value)
        row = {
            "step": step,
            "rank": ranks.rank(),
            "gradient_norm": norm,
            "terms": values,
            "batches": [
                {
                    "loss": float(batch["loss"]),
                    "input_ids": None
                    if batch["input_ids"] is None
                    else batch["input_ids"].tolist(),
                }
                for batch in self._batches
            ],
        }
        with self.run.bad_batches.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


class CollapseWatch(TrainerCallback):
    """Warns when routing stays collapsed over several logs.

    Args:
        callback: the callback whose values are read; add this one after it.
        max_violation: limit of the worst layer's (max load / mean load) - 1; None means 3/4 of the
            largest possible value, E / K - 1.
        dead_share: limit for the share of experts that get no tokens.
        patience: number of consecutive logs.
    """

    def __init__(
        self,
        callback: SpecializationCallback,
        max_violation: float | None = None,
        dead_share: float = 0.5,
        patience: int = 5,
    ):
        self.callback = callback
        self.max_violation = max_violation
        self.dead_share = dead_share
        self.patience = patience
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
        limit = self.max_violation
        if limit is None:
            limit = collapse_limit(facts.num_experts, facts.top_k)
        violation = logs["routing/max_violation_worst_layer"]
        dead = logs["routing/dead_experts"] / facts.num_experts
        if violation <= limit and dead <= self.dead_share:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == self.patience and state.is_world_process_zero:
            log.warning(
                "WARNING: routing has collapsed for %d logs up to step %d: worst layer's MaxVio "
                "%.2f (limit %.2f), experts without a token %.0f %% (limit %.0f %%). Raise "
                "method.terms.load_balance.weight, set method.bias_update: 1.0e-3, lower "
                "trainer.learning_rate, or freeze the router (router.train: frozen)",
                self.patience,
                state.global_step,
                violation,
                limit,
                100 * dead,
                100 * self.dead_share,
            )
