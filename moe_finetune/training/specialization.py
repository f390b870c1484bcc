"""A method on a model without any trainer: losses, routing changes and statistics.

    model.train()  # from_pretrained leaves it in eval mode, in which nothing is injected
    with Specialization(model, "orthogonal_variance", total_steps=1000) as method:
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()

The losses add to the gradients automatically. ``step()`` advances schedules and the loss-free bias,
and raises if there was no training forward since the last call. A learned bias belongs to the
weights: :meth:`Specialization.rest` ends training and keeps the bias on the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from moe_finetune.errors import CaptureError, ObjectiveError, QuantizationError
from moe_finetune.io.terminal import terminal
from moe_finetune.lora.coverage import experts_line
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.choice.noise import TrainingNoise
from moe_finetune.moe.context import CONTEXT_KEY
from moe_finetune.moe.experts.dense_router import DenseRouter, check_dense
from moe_finetune.moe.experts.grouped_products import Kernel
from moe_finetune.moe.layers import backbone_of, causal_lm, family_in, in_mode, model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.hooks import Observer, Recorder
from moe_finetune.quantization.weight import quantized
from moe_finetune.recipe.method import Method, resolve_method
from moe_finetune.training import ranks
from moe_finetune.training.measures.loss_shares import StrengthMeter
from moe_finetune.training.measures.routing_statistics import TrainingStatistics
from moe_finetune.training.reached_weights import STEPS, check_reach, fingerprints, unmoved_since
from moe_finetune.training.refuse_launch import check_forward
from moe_finetune.training.refuse_packing import packing_problem
from moe_finetune.training.save_and_resume.saved_bias import KeptBias

log = logging.getLogger(__name__)

_ON_MODEL: WeakKeyDictionary[nn.Module, ref[Specialization]] = WeakKeyDictionary()


def on_model(model: nn.Module) -> Specialization | None:
    """The method that is installed on ``model`` or left its bias there, or None."""
    reference = _ON_MODEL.get(backbone_of(model))
    return reference() if reference is not None else None


class Specialization:
    """Context manager that installs a method on a model and removes it again.

    Args:
        model: a supported causal language model, with or without PEFT.
        method: the name of a preset, a ``method:`` mapping, or a resolved method.
        dropout: LoRA dropout inside the routed and shared experts (PEFT has none there).
        kernel: how the experts' products run, see
            :class:`~moe_finetune.moe.recorder.hooks.Recorder`.
        accumulation: micro-batches per optimizer step; assign to ``accumulation`` before a shorter
            window.
        total_steps: optimizer steps of the run, for schedules.
        seed: of the experts that ``dense_sample`` draws, with step, micro-batch, layer and rank.

    Attributes:
        objective, recorder, statistics, balancer, strength: the method's parts.
        unmoved: trainable tensors that were unchanged after ten steps; None before.
        run: an object that identifies the training, such as a trainer's state.

    Raises:
        RecipeError: an unknown preset, term or option.
        ObjectiveError: a term that the model cannot compute or that reaches nothing trainable; in a
            training forward: fp16, or the model's own balance loss.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | dict[str, Any] | Method,
        *,
        dropout: float = 0.0,
        kernel: Kernel = "auto",
        accumulation: int = 1,
        total_steps: int = 1,
        seed: int = 42,
    ):
        self.model = model
        self.method = resolve_method(method)
        self.accumulation = accumulation
        self.total_steps = total_steps
        self.steps = self._micro_batch = 0
        self.seed = seed
        facts = model_facts(model)
        self.objective = Objective(self.method.terms, facts)
        self.statistics = TrainingStatistics(
            facts.moe_layers, facts.num_experts, [term.name for term in self.objective.terms]
        )
        noise = TrainingNoise(self.method.perturbations)
        self.balancer: BiasBalancer | None = None
        self.perturbation: Perturbation | None = noise if noise.active else None
        observers: list[Observer] = [self.statistics]
        if self.method.bias_update is not None:
            self.balancer = BiasBalancer(
                facts.selecting_layers, facts.num_experts, self.method.bias_update, noise
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
            kernel=kernel,
        )
        self.recorder.change(scale=self._scale, note_repeated=self.statistics.note_repeated)
        if self.method.router_gradient == "dense":
            check_dense(family_in(model), facts, self.method.dense_sample)
            dense = DenseRouter(self.method.dense_sample, self._draw)
            self.recorder.change(dense_router=dense)
            if facts.fixed_layers:
                log.info(
                    "method.router_gradient: dense: layers %s look experts up by token, so no "
                    "other expert could be selected there; their routers learn from these",
                    ", ".join(map(str, facts.fixed_layers)),
                )
        self.strength = StrengthMeter(self.recorder, self.objective, self.method.strength.first)
        self.unmoved: list[str] | None = None
        self.run: object = None
        self._start: dict[str, torch.Tensor] = {}
        self._kept: KeptBias | None = None
        if self.balancer is not None:
            exported = self.method.export_bias == "write"
            self._kept = KeptBias(model, self.balancer, self, exported)
        self._unhook: Callable[[], None] | None = None
        self._trained_on = False
        self._said_eval = False
        self._packed = False

    def __enter__(self) -> Specialization:
        self.install()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.restore()
        if kind is None and self.steps and ranks.rank() == 0:
            terminal().say(experts_line(self.model))
            terminal().say(
                "routing: read() has the figures since its last call; "
                "SpecializationCallback(..., output=FOLDER) draws it in a trainer"
            )

    def install(self) -> None:
        """Check that every term reaches something trainable, then install the hooks."""
        if on_model(self.model) not in (None, self):
            raise CaptureError(
                "another method is active on this model, or its routing bias is still there; "
                "call its restore() first"
            )
        _check_frozen(self.model)
        check_reach(self.model, self.objective, self.method.router_gradient == "dense")
        self.recorder.install()
        backbone = self.recorder.backbone
        hook = backbone.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._unhook = hook.remove
        if self._kept is not None:
            self._kept.in_saves()
        _ON_MODEL[backbone] = ref(self)
        try:
            self.strength.begin(self.steps)
        except ObjectiveError:
            self.restore()
            raise
        self._start = fingerprints(self.model)

    @property
    def at_work(self) -> bool:
        return self.recorder.installed

    def restore(self) -> None:
        """Restore the model to its original state, without a learned bias."""
        self._stop()
        if self._kept is not None:
            self._kept.remove()
        if on_model(self.model) is self:
            del _ON_MODEL[self.recorder.backbone]

    def rest(self) -> None:
        """Remove the losses but keep a learned bias, in forwards and in saves."""
        self.strength.finish()
        self._stop()
        if self._kept is not None:
            self._kept.in_forwards()

    def _scale(self) -> float:
        return 1.0 / self.accumulation

    def _draw(self) -> tuple[int, ...]:
        self._micro_batch += 1
        return self.seed, self.steps, self._micro_batch

    def _stop(self) -> None:
        self.strength.close()
        self.recorder.restore()
        self.recorder.change(scale=self._scale)  # another may hold a trainer
        self.run = None
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _before_forward(self, backbone: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():
            return
        if backbone.training:
            check_forward(backbone.config, kwargs, next(self.model.parameters()).device)
            self._trained_on = True
            # A recorder that was restored and installed again acts after this hook: no context yet.
            context = kwargs.get(CONTEXT_KEY)
            if context is not None and context.packed and not self._packed:
                self._packed = True
                config = causal_lm(self.model).config
                if (problem := packing_problem(config, family_in(self.model))) is not None:
                    log.warning("WARNING: positions start again within a row: %s", problem)
        elif not self._said_eval:
            self._said_eval = True
            log.warning(
                "WARNING: the model ran in eval mode with gradients enabled: the method adds no "
                "loss in that mode. Call model.train() before a training forward "
                "(from_pretrained returns eval mode), and wrap other forwards in torch.no_grad()"
            )

    def begin_step(self, step: int, total_steps: int) -> None:
        self.steps, self.total_steps, self._micro_batch = step, total_steps, 0
        self.objective.set_progress(step, max(total_steps, 1))
        self.strength.begin(step)

    def step(self) -> None:
        """Call this after every optimizer step, on all ranks."""
        if not self._trained_on:
            raise ObjectiveError(
                f"step {self.steps}: the model did not run in training mode with gradients "
                "enabled since the last step, so the method had no effect; call model.train() "
                "before the forward, and remove torch.no_grad()"
            )
        self._trained_on = False
        if rows := self.strength.end():
            self.statistics.note_strength(rows)
        if self.balancer is not None:
            self.balancer.step()
        self.begin_step(self.steps + 1, self.total_steps)
        if self.unmoved is None and self.steps >= STEPS:
            self.unmoved = unmoved_since(self._start, self.model)
            self._start = {}

    def read(self) -> dict[str, float]:
        """Losses and routing metrics since the last read; see :class:`TrainingStatistics`."""
        return self.statistics.read()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must store: weights found for shares, and routing biases."""
        return {
            **self.objective.state_dict(),
            **(self.balancer.state_dict() if self.balancer else {}),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned after at least one step."""
        weights = self.objective.state_dict()
        expected = self.state_dict().keys()
        missing, strange = expected - state.keys(), state.keys() - expected
        if missing or strange:
            problem = (
                f"lacks '{min(missing)}', which this method needs"
                if missing
                else f"contains '{min(strange)}', which this method does not use"
            )
            raise ObjectiveError(
                f"the saved state {problem}; resume with the method that the checkpoint was "
                "trained with, or start again"
            )
        experts = self.objective.facts.num_experts
        for key, bias_E in state.items():
            if key not in weights and bias_E.shape != (experts,):
                raise ObjectiveError(
                    f"the saved state's '{key}' has shape {tuple(bias_E.shape)}, and this model "
                    f"has {experts} experts"
                )
        self._set(state)

    def carry_over(self, previous: Specialization) -> None:
        self._set({**self.state_dict(), **previous.state_dict()})

    def _set(self, state: Mapping[str, torch.Tensor]) -> None:
        self.objective.load_state_dict(state)
        if self.balancer is not None:
            self.balancer.load_state_dict(state)


def _check_frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and quantized(parameter):
            raise QuantizationError(
                f"'{name}' is quantized and cannot be trained; train a LoRA adapter on it (lora: "
                "or target_parameters, not modules_to_save), or load the model without quantization"
            )


def measure_strength(
    model: nn.Module, method: Any, batches: Iterable[Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Measure the strength of each of ``method``'s terms on one window, without training.

    Args:
        model: a supported causal language model, with or without PEFT; parameters to train have
            ``requires_grad`` set.
        method: a preset's name, a ``method:`` mapping, or a resolved method. A share is converted
            to the weight that gives it.
        batches: the window's micro-batches, each with ``labels``; the language loss is the mean
            over all tokens that have a label.

    Returns:
        One row per term: ``term``, ``weight``, ``share_router``, ``share_experts``,
            ``cosine_router``, ``cosine_experts`` (None if the part does not train) and
            ``weight_for_10_percent`` (None for a term without a gradient, such as a hinge that is
            met).

    Raises:
        ObjectiveError: there are no batches, a batch has no labels, or a term with a share has no
            gradient.
    """
    window = [dict(batch) for batch in batches]
    if not window or any(batch.get("labels") is None for batch in window):
        raise ObjectiveError("measure_strength needs at least one batch, each with labels")
    learned = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
    method = resolve_method(method)
    measured = method.strength.model_copy(update={"first": True})
    method = method.model_copy(update={"strength": measured})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trainable]
    device = next(model.parameters()).device
    try:
        with (
            in_mode(model, train=True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            Specialization(model, method, accumulation=len(window)) as specialization,
        ):
            for batch, tokens in zip(window, learned, strict=True):
                (model(**batch).loss * (tokens / max(sum(learned), 1))).backward()
            rows = specialization.strength.end()
            for row in rows:
                if (share := method.terms[row.term].share) is not None and not row.weight:
                    raise ObjectiveError(
                        f"method.terms.{row.term}.share: no weight gives it a share of {share:g} "
                        f"in the window: {row.missing}; give a weight instead, or remove the term"
                    )
            return [row.row() for row in rows]
    finally:
        for parameter, gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient
