"""What one training step keeps and needs, layer by layer, from a run on tensors without memory.

A short model of the same layers runs forward and backward on fake tensors, under the recipe's
losses, LoRA, checkpointing and TRL's head: shapes, dtypes and lifetimes are those of the run,
whatever the family's blocks compute. :func:`step_profile` returns what each kind of layer adds, and
``plan.py`` puts the whole model together from that.

The experts run as by the grouped kernel, a GPU's; one product an expert needs less.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_finetune.errors import MoeFinetuneError, UnsupportedModelError
from moe_finetune.training.memory.attention import fused_attention
from moe_finetune.training.memory.live import LiveBytes
from moe_finetune.training.memory.stage import cache_bytes, stage_loss, step_shape

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

Device = Literal["cuda", "cpu"]
EXTRA_LAYERS = 3
"""Layers after the last kind is met: one whose neighbours are of its kind, and the last, which
hands nothing on."""


@dataclass(frozen=True)
class LayerBytes:
    """What one decoder layer adds, in bytes.

    Attributes:
        kept: from its forward until its backward is done.
        forward, backward: the most that is alive during it, beyond what was when it began.
        released: what is alive after its backward less than before; gradients not counted.
    """

    kept: int
    forward: int
    backward: int
    released: int


@dataclass(frozen=True)
class StepProfile:
    """A step's parts.

    Attributes:
        layers: by decoder layer of the whole model.
        before: what the forward keeps before the first layer.
        head: the most that is alive during head and loss, beyond what the layers have left.
        after_head: what of it is alive when the last layer's backward begins, gradients not
            counted.
        cache: what generating holds of a row, by layer: whatever its length, and for each token.
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
        config: of the whole model.
        kinds: by decoder layer, equal where layers are alike.
        recipe: the run; its rows are taken to be full.
        device: where it would train: what attention keeps, and TRL's default of checkpointing.
        losses: whether the method's losses are on.

    Raises:
        UnsupportedModelError: the model cannot run on tensors without memory.
    """
    last_new = max(kinds.index(kind) for kind in kinds)
    count = min(len(kinds), last_new + EXTRA_LAYERS)
    short = _shortened(config, count)
    marks = _Marks(count)
    try:
        with _quiet():
            model = _model(short, recipe, device)
            with ExitStack() as stack:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(marks.live)
                stack.enter_context(fused_attention(device))
                # The real one's rules for tensors without memory know bfloat16 alone.
                stack.enter_context(patch("moe_finetune.moe.grouped.grouped_mm", _grouped_mm))
                stack.enter_context(patch("moe_finetune.moe.grouped._aligned", lambda _: True))
                if device == "cuda":  # which takes all tokens at once
                    place = "moe_finetune.moe.by_token.CACHED_BYTES"
                    stack.enter_context(patch(place, 2**62))
                else:
                    stack.enter_context(head_tiles(config))
                _step(model, short, recipe, marks, losses)
                cache = cache_bytes(model) if step_shape(recipe).generated else []
    except MoeFinetuneError:
        raise
    except Exception as error:  # an operation that has no rule for tensors without memory
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(
            f"the memory of a step of this {config.model_type} cannot be computed: {said:.200}"
        ) from error
    rows = marks.layers()
    stands = [
        index if count == len(kinds) else _like(kinds, kind, count)
        for index, kind in enumerate(kinds)
    ]
    return StepProfile(
        [rows[index] for index in stands],
        marks.before,
        marks.head,
        marks.after_head,
        [cache[index] for index in stands] if cache else [],
    )


def head_tiles(config: Any) -> AbstractContextManager[Any]:
    """Let TRL's tiles of logits be no wider than the vocabulary.

    Theirs may be; on a CPU, pages that nobody touches are not there.
    """
    tile = min(config.get_text_config().vocab_size, 32768)
    return patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", tile)


def _shortened(config: Any, count: int) -> Any:
    """The config of the first layers: what it lists by layer is cut with their number."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers, text.num_hidden_layers = text.num_hidden_layers, count
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:count])
    return short


def _like(kinds: list[Any], kind: Any, count: int) -> int:
    """The layer of the short model that stands for ``kind``: the last but for the very last."""
    return max(index for index in range(count - 1) if kinds[index] == kind)


class _Marks:
    """Bytes alive at the borders between layers, forward and backward."""

    def __init__(self, count: int):
        self.live = LiveBytes()
        self.count = count
        self.base = self.before = self.head = self.after_head = 0
        self._begin: dict[int, int] = {}
        self._forward: dict[int, int] = {}  # most
        self._backward: dict[int, tuple[int, int, int]] = {}  # begin, end, most
        self._top = self._now = self._held = 0

    def forward_begins(self, layer: int) -> None:
        """Before decoder layer ``layer`` runs for the first time."""
        if layer == 0:
            self.before = self.live.now - self.base
        self.live.reset()
        self._begin[layer] = self.live.now  # corrects what its predecessor's end has noted

    def forward_ends(self, layer: int) -> None:
        """After it."""
        self._forward[layer] = self.live.reset()
        self._top = self._begin[layer + 1] = self.live.now

    def backward_reaches(self, border: int, gradients: int) -> None:
        """The gradient of what goes into layer ``border`` is there, or the loss's for ``count``.

        ``gradients``: bytes of parameters' gradients by now.
        """
        most, now = self.live.reset(), self.live.now
        if border == self.count:
            self.head = most - self._top
            self.after_head = now - self._top - gradients
        else:
            self._backward[border] = (self._now, now - (gradients - self._held), most)
        self._now, self._held = now, gradients

    def layers(self) -> list[LayerBytes]:
        """By layer of the short model."""
        rows = []
        for index in range(self.count):
            forward, (begin, end, most) = self._begin[index], self._backward[index]
            rows.append(
                LayerBytes(
                    kept=self._begin[index + 1] - forward,
                    forward=self._forward[index] - forward,
                    backward=most - begin,
                    released=begin - end,
                )
            )
        return rows

    def end(self, gradients: int) -> None:
        """After the backward: it has stopped in the lowest layer above which something trains."""
        lowest = min(self._backward, default=self.count)
        if lowest > 0:
            self.backward_reaches(lowest - 1, gradients)
        for layer in range(lowest - 1):
            self._backward[layer] = (self._now, self._now, self._now)


def _model(config: Any, recipe: Recipe, device: Device) -> Any:
    """The adapted model on the meta device, its checkpointing set as TRL sets it."""
    from trl.trainer.utils import add_fused_lm_head

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.training.memory.meta import meta_model

    attention = recipe.model.attn_implementation
    if attention is not None and attention.startswith("flash"):
        attention = "sdpa"  # keeps the same, and needs no package here
    model: Any = meta_model(config, attention)
    if recipe.lora is None or recipe.model.dtype == "float32":
        model = model.float()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    lora = recipe.lora
    if lora is not None and lora.experts != "all":
        lora = lora.model_copy(update={"experts": "all"})  # the selection is of the whole model
    with torch.device("meta"):
        model = add_lora(model, lora, recipe.router.train).train()
    if checkpointing(recipe, device):
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "preserve_rng_state": False}  # no state on fake tensors
        )
        model.enable_input_require_grads()
    return model


def checkpointing(recipe: Recipe, device: Device) -> bool:
    """Whether layers run again in the backward: the toolkit's default is on GPUs alone."""
    return bool(recipe.trainer.get("gradient_checkpointing", device == "cuda"))


def _step(model: Any, config: Any, recipe: Recipe, marks: _Marks, losses: bool) -> None:
    """Forward and backward of one micro-batch on fake tensors, with marks between layers."""
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import backbone_of, model_facts
    from moe_finetune.moe.noise import TrainingNoise

    _give_memory(model)
    marks.base = marks.live.now
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
        token_mask=recipe.method.token_mask,
        dropout=recipe.lora.dropout if recipe.lora else 0.0,
        kernel="grouped",
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> int:
        return sum(p.numel() * p.element_size() for p in trained if p.grad is not None)

    recorder.install()
    _watch(backbone_of(model).layers, marks, gradients)
    shape = step_shape(recipe)
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.model.dtype == "bfloat16"):
        loss = stage_loss(model, ids, recipe)
    loss.backward()
    marks.end(gradients())


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """``grouped_mm``'s shapes: rows (S, I) by (E, I, O), or (O, S) by (S, I), group by group."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])


def _watch(layers: Any, marks: _Marks, gradients: Any) -> None:
    """Hooks that mark where each layer begins and ends."""

    def reaches(tensor: Tensor, border: int) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: marks.backward_reaches(border, gradients()))

    begun: set[int] = set()
    ended: set[int] = set()  # checkpointing runs a layer again

    def before(layer: nn.Module, args: tuple, index: int) -> None:
        if index not in begun:
            begun.add(index)
            if index == 0:
                reaches(args[0], 0)
            marks.forward_begins(index)

    def after(layer: nn.Module, args: tuple, output: Any, index: int) -> None:
        if index not in ended:
            ended.add(index)
            marks.forward_ends(index)
            reaches(output[0] if isinstance(output, tuple) else output, index + 1)

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda m, a, i=index: before(m, a, i))
        layer.register_forward_hook(lambda m, a, o, i=index: after(m, a, o, i))


def _give_memory(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake ones, which have a device; ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    held = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is said of a model that is only measured."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
