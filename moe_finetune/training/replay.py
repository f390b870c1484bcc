"""Run the forwards of an optimizer step's window again, with chosen losses alone.

Each training forward is noted as it runs: the model's inputs, its random state, and the gradient
that the trainer's own loss sends into the last hidden state. That is all it takes to get, under any
trainer, the gradient of that loss alone or of one term alone: the same forward once more, with
nothing or with this term injected. Gradients, running tables, statistics and random state are left
as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from moe_finetune.losses.objective import Objective
from moe_finetune.moe.context import CONTEXT_KEY
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.tokens import Tokens
from moe_finetune.training import ranks

_NOT_AN_INPUT = {
    CONTEXT_KEY,
    "past_key_values",
    "use_cache",
    "cache_position",
    "logits_to_keep",
}

Gradients = dict[str, list[Tensor]]
"""By part, "router" or "experts": of its trainable parameters, in order."""


@dataclass
class _Forward:
    """One training forward of the window, as it is needed to run it again."""

    inputs: dict[str, Any]
    tokens: Tokens | None
    scale: float
    random: tuple[Tensor, Tensor | None]
    tables: dict[str, Tensor]
    gradient: Tensor | None = None


class Replay:
    """Notes an installed recorder's training forwards between :meth:`note` and :meth:`forget`.

    Args:
        recorder: what injects the losses; its hooks must be on the model before :meth:`note`.
        objective: the recorder's.
    """

    def __init__(self, recorder: Recorder, objective: Objective):
        self.recorder = recorder
        self.objective = objective
        self._forwards: list[_Forward] = []
        self._again: _Forward | None = None
        self._hidden: Tensor | None = None
        self._handles: list[Any] = []

    # -- noting -------------------------------------------------------------------------------

    def note(self) -> None:
        """Begin to note training forwards; earlier ones are forgotten."""
        self.forget()
        backbone = self.recorder.backbone
        self._handles = [
            # After the recorder's own hook, whose context it reads.
            backbone.register_forward_pre_hook(self._before, with_kwargs=True),
            backbone.register_forward_hook(self._after),
        ]

    def forget(self) -> None:
        """Take the hooks off and forget what was noted."""
        while self._handles:
            self._handles.pop().remove()
        self._forwards, self._again, self._hidden = [], None, None

    @property
    def count(self) -> int:
        """Forwards noted so far through which a gradient came back."""
        return sum(forward.gradient is not None for forward in self._forwards)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        context = kwargs.get(CONTEXT_KEY)
        if not (module.training and torch.is_grad_enabled()) or context is None:
            return
        if self._again is not None:
            context.tokens = self._again.tokens
            _set_random(self._again.random, self._device)
            return
        inputs = {k: v for k, v in kwargs.items() if k not in _NOT_AN_INPUT and v is not None}
        if args:
            inputs["input_ids"] = args[0]
        held = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        random, tables = _random(self._device), self.objective.state_dict()
        self._forwards.append(_Forward(held, context.tokens, context.scale, random, tables))

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        if self._again is not None:
            self._hidden = hidden
        elif self._forwards and hidden.requires_grad:
            forward = self._forwards[-1]

            def keep(gradient: Tensor) -> None:
                held = forward.gradient
                forward.gradient = gradient.detach().clone() if held is None else held + gradient

            hidden.register_hook(keep)

    # -- running again ------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep what the reruns inside would change, and put it back."""
        recorder, parameters = self.recorder, self.parameters()
        gradients = [parameter.grad for parameter in parameters]
        tables, random = self.objective.state_dict(), _random(self._device)
        kept = recorder.objective, recorder.observers, recorder.scale, recorder.token_mask
        recorder.observers, recorder.token_mask = [], "attention"
        try:
            yield
        finally:
            recorder.objective, recorder.observers, recorder.scale, recorder.token_mask = kept
            self.objective.load_state_dict(tables)
            _set_random(random, self._device)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def gradients(self, *names: str) -> Gradients:
        """The window's gradients of these terms at weight 1; of the trainer's loss without names.

        Averaged over ranks, as a trainer does it. Call it on every rank, inside :meth:`running`.
        """
        for parameter in self.parameters():
            parameter.grad = None
        self.recorder.objective = self.objective.only(*names)
        for forward in self._forwards:
            if forward.gradient is not None:
                self.objective.load_state_dict(forward.tables)
                self._run(forward, trainers_loss=not names)
        return {
            part: [_averaged(parameter) for parameter in own] for part, own in self.parts().items()
        }

    def _run(self, forward: _Forward, trainers_loss: bool) -> None:
        model: Any = self.recorder.model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        self.recorder.scale = lambda: forward.scale
        self._again = forward
        try:
            output = model(**forward.inputs, use_cache=False, logits_to_keep=1)
            assert self._hidden is not None and forward.gradient is not None
            # Through the model's own output: FSDP2 hangs its backward on it.
            loss = output.logits.float().sum() * 0.0
            if trainers_loss:
                loss = loss + (self._hidden * forward.gradient).float().sum()
            loss.backward()
        finally:
            self._again, self._hidden = None, None

    def parameters(self) -> list[nn.Parameter]:
        """All that trains."""
        return [p for p in self.recorder.model.parameters() if p.requires_grad]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """What trains in the routers and in the routed experts; without a part that is frozen."""
        layers = self.recorder.layers
        modules = {
            "router": [layer.router for layer in layers],
            "experts": [layer.outer_experts for layer in layers],
        }
        found = {
            part: [p for module in own for p in module.parameters() if p.requires_grad]
            for part, own in modules.items()
        }
        return {part: own for part, own in found.items() if own}

    @property
    def _device(self) -> torch.device:
        return next(self.recorder.model.parameters()).device


def product(left: list[Tensor], right: list[Tensor]) -> float:
    """Inner product of two lists of gradients, whole ones or shards, in float64."""
    total = 0.0
    for a, b in zip(left, right, strict=True):
        value: Any = (a.double() * b.double()).sum()
        total += float(value.full_tensor() if hasattr(value, "full_tensor") else value)
    return total


def _averaged(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient over all ranks; that of a shard is averaged already."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    if ranks.world_size() == 1 or hasattr(gradient, "device_mesh"):
        return gradient
    gradient = gradient.clone()
    distributed.all_reduce(gradient)
    return gradient / ranks.world_size()


def _random(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_random(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
