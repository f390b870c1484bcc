"""The specialization losses inside any transformers or TRL trainer.

    trainer = SFTTrainer(..., callbacks=[SpecializationCallback("orthogonal_variance")])

The callback installs the recorder on the trainer's model when training begins and restores the
model when it ends. ``attach(trainer)`` is optional: it lets the callback read the accumulation
window from the trainer (exact with unsized data and on a resume inside an epoch) and puts its
values into what every other logger sees.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from moe_finetune.balancing.bias import BiasBalancer
from moe_finetune.balancing.perturb import TrainingNoise
from moe_finetune.capture.recorder import (
    Observer,
    Perturbation,
    Recorder,
    backbone_of,
    model_facts,
)
from moe_finetune.capture.statistics import TrainingStatistics
from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.losses.objective import Objective
from moe_finetune.recipe import Method, resolve_method
from moe_finetune.training.reach import check_reach
from moe_finetune.training.state import STATE_FILE, load_state, save_state
from moe_finetune.training.window import AccumulationWindow

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)
STEPS_BEFORE_STILL_IS_SUSPICIOUS = 10


class SpecializationCallback(TrainerCallback):
    """Adds a method's losses and routing metrics to a trainer.

    Args:
        method: a preset's name, or the same mapping as ``method:`` in a recipe.
        dropout: LoRA dropout inside the routed and shared experts (PEFT has none there).
        **overrides: keys of ``method:`` laid over the preset.

    Raises:
        RecipeError: an unknown preset, term or option.
    """

    def __init__(
        self, method: str | dict[str, Any] | Method, *, dropout: float = 0.0, **overrides: Any
    ):
        self.method = resolve_method(method, **overrides)
        self.dropout = dropout
        self.recorder: Recorder | None = None
        self.objective: Objective | None = None
        self.statistics: TrainingStatistics | None = None
        self.perturbation: Perturbation | None = None
        self.balancer: BiasBalancer | None = None
        self.reached: dict[str, list[str]] = {}
        self.unmoved: list[str] = []
        self._window = AccumulationWindow()
        self._start: dict[str, torch.Tensor] = {}
        self._checked_moves = False

    def attach(self, trainer: Trainer) -> SpecializationCallback:
        """Read the accumulation window from ``trainer`` and log before its other callbacks."""
        self._window.trainer = trainer
        if getattr(trainer, "aux_loss_enabled", False):
            raise ObjectiveError(_OWN_BALANCE_LOSS)
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            trainer.add_callback(self)
        callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    # -- the trainer's events -----------------------------------------------------------------

    def on_train_begin(self, args, state, control, model=None, **kwargs):  # noqa: D102
        if args.fp16:
            raise ObjectiveError(
                "fp16 scales the trainer's loss and not the injected terms; train in bf16"
            )
        if getattr(backbone_of(model).config, "output_router_logits", False):
            raise ObjectiveError(_OWN_BALANCE_LOSS)
        facts = model_facts(model)
        self.objective = Objective.from_options(
            {name: options.model_dump() for name, options in self.method.terms.items()}, facts
        )
        self.reached = check_reach(model, self.objective)
        self.statistics = TrainingStatistics(facts.moe_layers, facts.num_experts)
        self.perturbation, self.balancer = _perturbation(self.method, facts)
        observers: list[Observer] = [self.statistics]
        if self.balancer is not None:
            observers.append(self.balancer.observe)
        self.recorder = Recorder(
            model,
            self.objective,
            observers=observers,
            perturbation=self.perturbation,
            token_mask=self.method.token_mask,
            dropout=self.dropout,
        )
        self.recorder.scale = self._window.scale
        self.recorder.install()
        self._window.begin(args, kwargs.get("train_dataloader"), state)
        self._remember(model)

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: D102
        assert self.objective is not None
        self._window.step(state)
        self.objective.set_progress(state.global_step, max(state.max_steps, 1))

    def on_step_end(self, args, state, control, model=None, **kwargs):  # noqa: D102
        if self.balancer is not None:
            self.balancer.step()
        if not self._checked_moves and state.global_step >= STEPS_BEFORE_STILL_IS_SUSPICIOUS:
            self._checked_moves = True
            self._look_for_unmoved(model)

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: D102
        if self.statistics is None or logs is None or "loss" not in logs:
            return
        values = self.statistics.read()
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_save(self, args, state, control, **kwargs):  # noqa: D102
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            save_state(folder / STATE_FILE, self.state_dict())

    def on_train_end(self, args, state, control, **kwargs):  # noqa: D102
        self.close()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors to save with a checkpoint: running tables of the terms, routing biases."""
        terms = self.objective.state_dict() if self.objective else {}
        return {**terms, **(self.balancer.state_dict() if self.balancer else {})}

    def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint folder, if it has one."""
        assert self.objective is not None
        if (folder / STATE_FILE).exists():
            state = load_state(folder / STATE_FILE)
            self.objective.load_state_dict(state)
            if self.balancer is not None:
                self.balancer.load_state_dict(state)

    def close(self) -> None:
        """Restore the model; also right after an exception in the trainer."""
        if self.recorder is not None:
            self.recorder.restore()

    # -- tensors that do not move --------------------------------------------------------------

    def _remember(self, model) -> None:
        self._start = {n: _fingerprint(p) for n, p in model.named_parameters() if p.requires_grad}

    def _look_for_unmoved(self, model) -> None:
        still = [
            name
            for name, parameter in model.named_parameters()
            if name in self._start and torch.equal(_fingerprint(parameter), self._start[name])
        ]
        self.unmoved, self._start = still, {}
        if still:
            log.warning(
                "%d tensors that should train did not move in the first %d steps: %s",
                len(still),
                STEPS_BEFORE_STILL_IS_SUSPICIOUS,
                ", ".join(still[:8]) + (" ..." if len(still) > 8 else ""),
            )


def _perturbation(
    method: Method, facts: ModelFacts
) -> tuple[Perturbation | None, BiasBalancer | None]:
    noise = TrainingNoise(method.perturbations)
    if method.bias_update is None:
        return (noise if noise.active else None), None
    balancer = BiasBalancer(facts.moe_layers, facts.num_experts, method.bias_update, noise)
    return balancer, balancer


_OWN_BALANCE_LOSS = (
    "the trainer adds the checkpoint's own load-balancing loss (router_aux_loss_coef); pass "
    "router_aux_loss_coef=0.0 to the trainer's config and choose a method with load_balance"
)


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """A few numbers that change when the tensor does."""
    values = parameter.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    wide = values.double().reshape(-1)
    ramp = torch.arange(1, wide.numel() + 1, device=wide.device, dtype=torch.float64)
    return torch.stack([wide.sum(), wide.square().sum(), (wide * ramp).sum()]).cpu()
