"""Run the forwards of an optimizer step's window again, for the gradient of each loss alone.

Each training forward is noted as it runs: the model's inputs, its random state, and the gradient
that the trainer's own loss sends into the last hidden state. That is all it takes to get, under any
trainer, the gradient of one term alone, or of the trainer's loss alone: the same forward once more,
then a backward for each. The trainer's loss needs none where the window's own backward can be seen:
what it left in the parameters, less the terms' part. Gradients, running tables, statistics and
random state are left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from moe_finetune.losses.inject import PerTermLosses
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.checkpointing import checkpoints
from moe_finetune.moe.context import CONTEXT_KEY, ForwardOverrides
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
    overrides: ForwardOverrides
    scale: float
    random: tuple[Tensor, Tensor | None]
    tables: dict[str, Tensor]
    gradient: Tensor | None = None


@dataclass
class _Rerun:
    """A forward that was run again: its graph, and the losses in it."""

    by_term: PerTermLosses
    hidden: Tensor
    logits: Tensor


class Replay:
    """Notes an installed recorder's training forwards between :meth:`note` and :meth:`forget`.

    Args:
        recorder: what injects the losses; its hooks must be on the model before :meth:`note`.
    """

    def __init__(self, recorder: Recorder, objective: Objective):
        self.recorder = recorder
        self.objective = objective
        self._forwards: list[_Forward] = []
        self._again: _Forward | None = None
        self._hidden: Tensor | None = None
        self._handles: list[Any] = []
        self._window: WindowGradients | None = None

    # -- noting -------------------------------------------------------------------------------

    def note(self) -> None:
        self.forget()
        backbone = self.recorder.backbone
        self._handles = [
            # After the recorder's own hook, whose context it reads.
            backbone.register_forward_pre_hook(self._before, with_kwargs=True),
            backbone.register_forward_hook(self._after),
        ]
        own = self._own()
        if own and self._at_once and not _sharded(own):
            self._window = WindowGradients(own)

    def forget(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._window is not None:
            self._window.close()
        self._window = None
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
            context.tokens, context.overrides = self._again.tokens, self._again.overrides
            _set_random(self._again.random, self._device)
            return
        inputs = {k: v for k, v in kwargs.items() if k not in _NOT_AN_INPUT and v is not None}
        if args:
            inputs["input_ids"] = args[0]
        held = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        random, tables = _random(self._device), self.objective.state_dict()
        self._forwards.append(
            _Forward(held, context.tokens, context.overrides, context.scale, random, tables)
        )

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
        if self._window is not None:
            self._window.close()  # what follows is not part of it
        try:
            with recorder.using(observers=(), token_mask="attention"):
                yield
        finally:
            self.objective.load_state_dict(tables)
            _set_random(random, self._device)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def measured(self, names: Sequence[str]) -> Iterator[tuple[str, Gradients, Gradients]]:
        """Each term of ``names``: its gradient at weight 1, and that of the trainer's loss.

        Averaged over ranks, as a trainer does it. Call it on every rank, inside :meth:`running`.
        """
        if not self._at_once:
            language = self._gradients([None])[None]
            for name in names:
                yield name, self._gradients([name])[name], language
            return
        wanted: list[str | None] = [*names] if self._window is not None else [*names, None]
        found = self._gradients(wanted)
        left = found[None] if self._window is None else self._left_by_trainer(self._window, found)
        language = self._gradients([None])[None] if left is None else left
        for name in names:
            yield name, found[name], language

    @property
    def _at_once(self) -> bool:
        """Whether the gradients of all terms fit: what trains is small, or the terms are few."""
        own = sum(parameter.numel() for parameter in self._own())
        return own * len(self.objective.terms) <= sum(
            parameter.numel() for parameter in self.recorder.model.parameters()
        )

    def _left_by_trainer(
        self, window: WindowGradients, found: Mapping[str | None, Gradients]
    ) -> Gradients | None:
        """What the window's backward left, less the terms; None where they drown the rest of it."""
        total = self._by_part(window.sums())
        for part, gradients in total.items():
            largest = 0.0
            for name, own in found.items():
                weight = self.objective.weights[name] if name else 0.0
                if weight == 0:
                    continue
                largest = max(largest, weight**2 * product(own[part], own[part]))
                for sum_, gradient in zip(gradients, own[part], strict=True):
                    sum_.sub_(gradient, alpha=weight)
            if largest > product(gradients, gradients):
                return None  # the difference of two large numbers
        return total

    def _gradients(self, names: Sequence[str | None]) -> dict[str | None, Gradients]:
        """The window's gradients of these terms at weight 1; of the trainer's loss for None.

        One forward for all, unless the model cannot keep its graph: then each has its own.
        """
        keeps = not _compiled(self.recorder.model)
        sums: dict[str | None, list[Tensor]] = {}
        for forward in self._forwards:
            if forward.gradient is None:
                continue
            rerun: _Rerun | None = None
            for name in names:
                if rerun is None or not keeps:
                    rerun = self._run(forward, names if keeps else [name])
                found = self._backward(rerun, forward, name, keeps and name != names[-1])
                if name in sums:
                    found = [held + own for held, own in zip(sums[name], found, strict=True)]
                sums[name] = found
                if not keeps or name == names[-1]:
                    rerun.by_term.losses.clear()  # a cycle of losses and their graph
        return {name: self._by_part(found) for name, found in sums.items()}

    def _run(self, forward: _Forward, names: Sequence[str | None]) -> _Rerun:
        """The forward once more, with the losses of these terms kept apart."""
        model: Any = self.recorder.model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        self.objective.load_state_dict(forward.tables)
        by_term = PerTermLosses()
        self._again = forward
        try:
            with self.recorder.using(
                objective=self.objective.only(*filter(None, names)),
                scale=lambda: forward.scale,
                per_term=by_term,
            ):
                output = model(**forward.inputs, use_cache=False, logits_to_keep=1)
            assert self._hidden is not None
            return _Rerun(by_term, self._hidden, output.logits)
        finally:
            self._again, self._hidden = None, None

    def _backward(
        self, rerun: _Rerun, forward: _Forward, name: str | None, retain: bool
    ) -> list[Tensor]:
        """One loss's gradient on this rank; of shards, on all."""
        own, below = self._own(), forward.gradient
        assert below is not None
        found: Sequence[Tensor | None]
        if _sharded(own) or checkpoints(self.recorder.backbone.layers):
            # Through the model's own output: FSDP2 hangs its backward on it, and a layer that is
            # run again gives free only what its backward has come by.
            rerun.by_term.on = name
            loss = rerun.logits.float().sum() * 0.0
            if name is None:
                loss = loss + (rerun.hidden * below).float().sum()
            every = self.parameters()
            if _sharded(own):
                for parameter in every:
                    parameter.grad = None
                loss.backward(retain_graph=retain)
                found = [parameter.grad for parameter in own]
            else:
                gradients = torch.autograd.grad(loss, every, retain_graph=retain, allow_unused=True)
                by_parameter = dict(zip(map(id, every), gradients, strict=True))
                found = [by_parameter[id(parameter)] for parameter in own]
        else:
            # From the losses themselves: what lies above them, and the model's head, is left out.
            roots, seeds = [rerun.hidden], [below.to(rerun.hidden.dtype)]
            if name is not None:
                losses = rerun.by_term.losses.get(name, [])
                roots = [loss for loss in losses if loss.requires_grad]
                seeds = [torch.full_like(loss, forward.scale) for loss in roots]
            found = [None] * len(own)
            if roots and own:
                found = torch.autograd.grad(
                    roots, own, seeds, retain_graph=retain, allow_unused=True
                )
        return [
            torch.zeros_like(parameter) if gradient is None else gradient.detach()
            for parameter, gradient in zip(own, found, strict=True)
        ]

    def _by_part(self, gradients: Sequence[Tensor]) -> Gradients:
        """Gradients of :meth:`_own`, averaged over ranks."""
        rest = iter(gradients)
        return {part: [_averaged(next(rest)) for _ in own] for part, own in self.parts().items()}

    def _own(self) -> list[nn.Parameter]:
        return [parameter for own in self.parts().values() for parameter in own]

    def parameters(self) -> list[nn.Parameter]:
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


def _averaged(gradient: Tensor) -> Tensor:
    """A gradient over all ranks; that of a shard is averaged already."""
    if ranks.world_size() == 1 or hasattr(gradient, "device_mesh"):
        return gradient
    gradient = gradient.clone()
    distributed.all_reduce(gradient)
    return gradient / ranks.world_size()


def _sharded(parameters: Sequence[nn.Parameter]) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in parameters)


def _compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled: its backward gives its buffers away."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def _random(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_random(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class WindowGradients:
    """Sums the gradients that reach ``parameters`` on this rank, unclipped, until :meth:`close`.

    ``parameter.grad`` is not such a sum: when an optimizer steps, it is averaged over ranks,
    clipped.

    Args:
        parameters: leaves, whole on this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._handles = [
            parameter.register_hook(partial(self._add, number))
            for number, parameter in enumerate(parameters)
        ]

    def _add(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:  # an expert that got no token
            return
        held = self._sums[number]
        gradient = gradient.detach()
        self._sums[number] = gradient.clone() if held is None else held + gradient

    def sums(self) -> list[Tensor]:
        """The sums so far, in the parameters' order; zeros where nothing came."""
        return [
            torch.zeros_like(parameter) if held is None else held
            for parameter, held in zip(self._parameters, self._sums, strict=True)
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
