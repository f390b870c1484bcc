"""A method at work on a model: losses, routing changes and statistics, without any trainer.

    with Specialization(model, "orthogonal_variance", total_steps=1000) as method:
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()

The losses join the gradients by themselves; ``step()`` moves schedules and the loss-free bias.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from moe_finetune.balancing.bias import BiasBalancer
from moe_finetune.balancing.perturb import TrainingNoise
from moe_finetune.capture.model import model_facts
from moe_finetune.capture.perturbation import Perturbation
from moe_finetune.capture.recorder import Observer, Recorder
from moe_finetune.capture.statistics import TrainingStatistics
from moe_finetune.losses.coupling import Coupling
from moe_finetune.losses.objective import Objective
from moe_finetune.method import Method, resolve_method
from moe_finetune.training.reach import check_reach

log = logging.getLogger(__name__)
STEPS_BEFORE_STILL_IS_SUSPICIOUS = 10


class Specialization:
    """Context manager that puts a method on a model and takes it off again.

    Args:
        model: a supported causal language model, with or without PEFT.
        method: a preset's name, a ``method:`` mapping, or a resolved method.
        dropout: LoRA dropout inside the routed and shared experts (PEFT has none there).
        accumulation: micro-batches of an optimizer step; assign to ``accumulation`` when a window
            is shorter.
        total_steps: optimizer steps of the run, for schedules.

    Attributes:
        objective, recorder, statistics, balancer: the parts.
        reached: trainable parameters that each term's gradient reaches.
        unmoved: trainable tensors that had not changed after ten steps.

    Raises:
        RecipeError: an unknown preset, term or option.
        ObjectiveError: a term that the model cannot carry or that reaches nothing trainable.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | dict[str, Any] | Method,
        *,
        dropout: float = 0.0,
        accumulation: int = 1,
        total_steps: int = 1,
    ):
        self.model = model
        self.method = resolve_method(method)
        self.accumulation = accumulation
        self.total_steps = total_steps
        self.steps = 0
        facts = model_facts(model)
        self.objective = Objective.from_options(
            {name: options.model_dump() for name, options in self.method.terms.items()}, facts
        )
        self.statistics = TrainingStatistics(
            facts.moe_layers, facts.num_experts, [term.name for term in self.objective.terms]
        )
        noise = TrainingNoise(self.method.perturbations)
        self.balancer: BiasBalancer | None = None
        self.perturbation: Perturbation | None = noise if noise.active else None
        observers: list[Observer] = [self.statistics]
        if self.method.bias_update is not None:
            self.balancer = BiasBalancer(
                facts.moe_layers, facts.num_experts, self.method.bias_update, noise
            )
            self.perturbation = self.balancer
            observers.append(self.balancer.observe)
        self.recorder = Recorder(
            model,
            self.objective,
            observers=observers,
            perturbation=self.perturbation,
            token_mask=self.method.token_mask,
            dropout=dropout,
        )
        self.recorder.scale = lambda: 1.0 / self.accumulation
        self.reached: dict[str, list[str]] = {}
        self.unmoved: list[str] = []
        self._start: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Specialization:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def install(self) -> None:
        """Check that every term reaches something trainable, then install the hooks."""
        self.reached = check_reach(self.model, self.objective)
        self.recorder.install()
        self._start = {
            name: _fingerprint(p) for name, p in self.model.named_parameters() if p.requires_grad
        }

    @property
    def at_work(self) -> bool:
        """Whether the hooks are on the model."""
        return self.recorder.installed

    def restore(self) -> None:
        """Leave the model as it was."""
        self.recorder.restore()

    def begin_step(self, step: int, total_steps: int) -> None:
        """Set schedules to optimizer step ``step``."""
        self.steps, self.total_steps = step, total_steps
        self.objective.set_progress(step, max(total_steps, 1))

    def step(self) -> None:
        """To be called after every optimizer step, on all ranks."""
        if self.balancer is not None:
            self.balancer.step()
        for term in self.objective.terms:
            if isinstance(term, Coupling):
                term.reduce_over_ranks()
        self.begin_step(self.steps + 1, self.total_steps)
        if self._start and self.steps >= STEPS_BEFORE_STILL_IS_SUSPICIOUS:
            self._look_for_unmoved()

    def read(self) -> dict[str, float]:
        """Losses and routing metrics since the last read; see :class:`TrainingStatistics`."""
        return self.statistics.read()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold: running tables of the terms, routing biases."""
        return {
            **self.objective.state_dict(),
            **(self.balancer.state_dict() if self.balancer else {}),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.objective.load_state_dict(state)
        if self.balancer is not None:
            self.balancer.load_state_dict(state)

    def snapshot(self) -> dict[str, Any]:
        """State to return to with :meth:`go_back`; cheap: tables are replaced, never changed."""
        return {"tables": self.state_dict(), "statistics": self.statistics.snapshot()}

    def go_back(self, held: dict[str, Any]) -> None:
        """Undo what the forwards since :meth:`snapshot` left: tables, loads, sums."""
        self.objective.load_state_dict(held["tables"])
        self.statistics.load_state_dict(held["statistics"])
        if self.balancer is not None:
            self.balancer.forget_loads()

    def _look_for_unmoved(self) -> None:
        self.unmoved = [
            name
            for name, parameter in self.model.named_parameters()
            if name in self._start and torch.equal(_fingerprint(parameter), self._start[name])
        ]
        self._start = {}
        if self.unmoved:
            shown = ", ".join(self.unmoved[:8]) + (" ..." if len(self.unmoved) > 8 else "")
            log.warning(
                "%d tensors that should train did not move in the first %d steps: %s",
                len(self.unmoved),
                STEPS_BEFORE_STILL_IS_SUSPICIOUS,
                shown,
            )


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """A few numbers that change when the tensor does."""
    values = parameter.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    wide = values.double().reshape(-1)
    ramp = torch.arange(1, wide.numel() + 1, device=wide.device, dtype=torch.float64)
    return torch.stack([wide.sum(), wide.square().sum(), (wide * ramp).sum()]).cpu()
