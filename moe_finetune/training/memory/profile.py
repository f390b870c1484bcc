"""The memory that one training step keeps and needs by layer, from a run on fake tensors.

A short model of the same layers runs forward and backward on fake tensors, under the recipe's
losses, LoRA, checkpointing and TRL's head: shapes, dtypes and lifetimes are those of the run,
whatever the family's blocks compute. :func:`step_profile` returns what each kind of layer adds, and
``plan.py`` combines it into the whole model.

The experts run as with the GPU's grouped kernel; one product per expert needs less memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_finetune.errors import MoeFinetuneError, UnsupportedModelError, reason_of
from moe_finetune.models.shrink import shortened
from moe_finetune.torch_extension import DynamicOutputShapeException, FakeTensorMode
from moe_finetune.training.memory.borders import Borders, LayerBytes, watch
from moe_finetune.training.memory.short_model import (
    Device,
    adapted_model,
    give_memory,
    stand_in,
)
from moe_finetune.training.memory.stage import cache_bytes, stage_loss, step_shape

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe


EXTRA_LAYERS = 3
"""Layers after the first of the last kind: one whose neighbors are of its kind, and the final one,
which has no successor."""


@dataclass(frozen=True)
class StepProfile:
    """The memory of a step's parts.

    Attributes:
        layers: one entry per decoder layer of the whole model.
        before: what the forward keeps before the first layer.
        head: peak during head and loss, above what the layers keep.
        after_head: part of it still alive when the last layer's backward begins, without gradients.
        cache: bytes of a generated row's cache by layer: fixed, and per token.
    """

    layers: list[LayerBytes]
    before: int
    head: int
    after_head: int
    cache: list[tuple[int, int]] = field(default_factory=list)


def step_profile(
    config: Any, kinds: list[Any], recipe: Recipe, device: Device, losses: bool = True
) -> StepProfile:
    """Run one micro-batch of ``recipe`` on a model of the first layers of ``config``.

    Args:
        kinds: a key for each decoder layer, equal for layers that compute alike.
        recipe: the run; its rows are assumed to be full.
        device: where it would train; decides what attention keeps and TRL's default for
            checkpointing.
        losses: whether to include the method's losses.

    Raises:
        UnsupportedModelError: the model cannot run on fake tensors.
    """
    from moe_finetune.moe import by_token, grouped, hooks
    from moe_finetune.moe.layers import model_facts

    last_new = max(kinds.index(kind) for kind in kinds)
    count = min(len(kinds), last_new + EXTRA_LAYERS)
    short = shortened(config, count)
    borders = Borders(count)
    try:
        with _quiet():
            model = adapted_model(short, recipe, device)
            # Some families ask the class on the meta device, whose tensors are not the step's.
            model_facts(model)
            _fix_positions(model)
            with ExitStack() as stack:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(borders.live)
                # A row is one sequence; fake positions have no values to show it.
                stack.enter_context(replaced(hooks, "separate", _one_sequence))
                # The real operator's rules for fake tensors support only bfloat16.
                stack.enter_context(replaced(grouped, "grouped_mm", _grouped_mm))
                stack.enter_context(replaced(grouped, "_aligned", lambda _: True))
                if device == "cuda":  # which takes all tokens at once, and fuses attention
                    stack.enter_context(replaced(by_token, "CACHED_BYTES", 2**62))
                    functional = torch.nn.functional
                    stack.enter_context(
                        replaced(functional, "scaled_dot_product_attention", _attend)
                    )
                _step(model, recipe, device, borders, losses)
                cache = cache_bytes(model) if step_shape(recipe).generated else []
    except MoeFinetuneError:
        raise
    except DynamicOutputShapeException as error:
        raise UnsupportedModelError(
            f"no memory plan for {config.model_type}: its class selects tokens by their values "
            f"({error.func}), so the size of a step's tensors is not known before it runs"
        ) from error
    except Exception as error:  # an operation without a rule for fake tensors
        reason = reason_of(error)
        raise UnsupportedModelError(
            f"the memory of a step of this {config.model_type} cannot be computed: {reason:.200}"
        ) from error
    rows = borders.layers()
    stands = [
        index if count == len(kinds) else stand_in(kinds, kind, count)
        for index, kind in enumerate(kinds)
    ]
    return StepProfile(
        [rows[index] for index in stands],
        borders.before,
        borders.head,
        borders.after_head,
        [cache[index] for index in stands] if cache else [],
    )


def _fix_positions(model: Any) -> None:
    """Skip the update of rotary frequencies, which reads the batch's longest position."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")


def _step(model: Any, recipe: Recipe, device: Device, borders: Borders, losses: bool) -> None:
    """Run forward and backward of one micro-batch on fake tensors, marking layer borders."""
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import backbone_of, model_facts
    from moe_finetune.moe.noise import TrainingNoise

    give_memory(model)
    borders.base = borders.live.now
    facts = model_facts(model)
    terms = recipe.method.terms if losses else {}
    chosen = {
        name: options.model_dump()
        for name, options in terms.items()
        if name != "coupling" or len(facts.moe_layers) > 1
    }
    noise = TrainingNoise(recipe.method.perturbations)
    recorder = Recorder(
        model,
        Objective.from_options(chosen, facts) if chosen else None,
        perturbation=noise if noise.active else None,
        dropout=recipe.lora.dropout if recipe.lora else 0.0,
        kernel="grouped",
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> int:
        return sum(p.numel() * p.element_size() for p in trained if p.grad is not None)

    recorder.install()
    watch(backbone_of(model).layers, borders, gradients)
    shape = step_shape(recipe)
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.model.dtype == "bfloat16"):
        loss = stage_loss(model, ids, recipe, device)
    loss.backward()
    borders.end(gradients())


def _one_sequence(kwargs: dict[str, Any], *_: Any) -> tuple[dict[str, Any], None, bool]:
    """Replacement for :func:`moe_finetune.moe.sequences.separate`: rows are not packed."""
    return kwargs, None, False


def _grouped_mm(rows: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """``grouped_mm``'s shapes: rows (S, I) times (E, I, O), or (O, S) times (S, I) by group."""
    if right.dim() == 3:
        return rows.new_empty(rows.shape[0], right.shape[2])
    return rows.new_empty(offs.shape[0], rows.shape[0], right.shape[1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence messages about a model that is only measured."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of ``owner`` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Fused(torch.autograd.Function):
    """Saves what flash and cuDNN attention save: Q, K, V, output and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Fused.apply(query, key, value)
