"""Install hooks that record what a model's MoE layers compute, and remove them afterwards.

Installed on one model instance:

1. backbone pre-hook: creates the forward's :class:`ForwardContext` and passes it down;
2. decoder-layer pre-hook: takes it out of the keyword arguments for the hooks below;
3. router hooks: perturb the input, select again with a bias, and record logits, weights and index;
4. experts function registered with transformers: computes LoRA separately;
5. block hook: builds the record, evaluates the objective, injects it at the block's output.

Nothing global is replaced, and :meth:`Recorder.restore` restores the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_finetune.errors import CaptureError
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.checkpointing import (
    REENTRANT,
    RunsAgain,
    check_block,
    check_layers,
    checkpoints,
    inside,
)
from moe_finetune.moe.context import CONTEXT_KEY, ForwardContext, ForwardPlan, Observer
from moe_finetune.moe.experts.grouped_products import Kernel, grouped_products
from moe_finetune.moe.experts.lora_factors import parameter_wrappers, run_linear, wrapped_linears
from moe_finetune.moe.layers import (
    MoeLayer,
    backbone_of,
    causal_lm,
    check_experts,
    is_spread,
    moe_layers,
    stacks,
)
from moe_finetune.moe.layout import read_layout
from moe_finetune.moe.packed_sequences import (
    InLayer,
    is_packed,
    runs_alone,
    separate,
    tell_positions,
)
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.foreign_kernels import check_kernels
from moe_finetune.moe.recorder.layer_hooks import LayerVisits
from moe_finetune.moe.tokens import read_tokens

log = logging.getLogger(__name__)
IMPLEMENTATION = "moe_finetune"


class Recorder:
    """Context manager that installs the hooks on ``model`` and removes them on exit.

    Args:
        objective, observers, needs, observe, token_mask: see :class:`ForwardPlan`.
        perturbation: changes to routing.
        dropout: LoRA dropout inside the experts.
        kernel: how the experts' products run: "grouped" is one call for all experts, "loop" one
            product per expert; "auto" uses "grouped" on GPUs and "loop" elsewhere.

    Attributes:
        plan: what the next forwards do; changed by :meth:`change` and :meth:`using`.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None = None,
        observers: Iterable[Observer] = (),
        needs: frozenset[str] = frozenset(),
        observe: Literal["train", "all"] = "train",
        perturbation: Perturbation | None = None,
        token_mask: Literal["attention", "labels"] = "attention",
        dropout: float = 0.0,
        kernel: Kernel = "auto",
    ):
        self.model = model
        self.backbone = backbone_of(model)
        self.plan = ForwardPlan(objective, tuple(observers), needs, observe, token_mask)
        self.perturbation = perturbation
        self.dropout = dropout
        self.kernel: Kernel = kernel
        self.layers = moe_layers(model)
        self._labels: Tensor | None = None
        self._ids: Tensor | None = None
        self._mask: Tensor | None = None
        self._said = False
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        return bool(self._undo)

    # -- the plan -----------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Change fields of the plan from the next forward on."""
        self.plan = replace(self.plan, **changes)

    @contextmanager
    def using(self, **changes: Any) -> Iterator[None]:
        """Change fields of the plan for forwards that start inside the context."""
        former = {name: getattr(self.plan, name) for name in changes}
        self.change(**changes)
        try:
            yield
        finally:
            self.change(**former)

    def add_observer(self, observer: Observer) -> None:
        self.change(observers=(*self.plan.observers, observer))

    # -- installing ---------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def install(self) -> None:
        """Install all hooks; on an error, restore the model."""
        if self._undo:
            return
        try:
            self._install()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        # Last first, so that an attribute that was replaced twice gets its original value back.
        while self._undo:
            self._undo.pop()()
        for layer in self.layers:
            layer.clear()
        self._labels = self._ids = self._mask = None

    def _install(self) -> None:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_function)
        for layer in self.layers:
            check_block(layer.block, layer.index)
            check_kernels(layer.block, layer.experts, layer.index)
            check_experts(layer)
            if self.plan.dense_router is not None and is_spread(layer.experts):
                raise CaptureError(
                    "method.router_gradient: dense: experts are spread over ranks, which would "
                    "have to exchange every token with every expert; set parallel.experts: 1, or "
                    "router_gradient: selected"
                )
            if "_moe_finetune" in layer.experts.__dict__:
                raise CaptureError(
                    "this model is already being recorded; call restore() of the first recorder"
                )
        self._check_kernel()
        if self.perturbation is not None:
            self.perturbation.install(self.model)
        self._hook(self.backbone.register_forward_pre_hook(self._start, with_kwargs=True))
        below_peft = causal_lm(self.model)  # which gets the labels of soft prompts, too
        if self.plan.token_mask == "labels" or self.layers[0].family.part:
            self._hook(below_peft.register_forward_pre_hook(self._note_inputs, with_kwargs=True))
            self._hook(below_peft.register_forward_hook(self._forget_inputs, always_call=True))
        every_visits = {
            id(layer.decoder_layer): LayerVisits(
                layer, self.layers, self.perturbation, self.dropout, self.kernel
            )
            for layer in self.layers
        }
        facts = self.layers[0].family.rows
        for module in map(inside, self.backbone.layers):
            visits_of_layer, in_layer = every_visits.get(id(module)), InLayer()
            moe_layer = visits_of_layer.layer if visits_of_layer else None
            rerun = RunsAgain(
                module,
                end_layer=visits_of_layer.after_layer if visits_of_layer else lambda output: output,
                finish=moe_layer.clear if moe_layer else lambda: None,
            )
            take = partial(self._take_context, moe_layer, in_layer, rerun)
            self._hook(module.register_forward_pre_hook(take, with_kwargs=True))
            # Always: a recomputation stops as soon as it has the tensors that it needs, by an
            # exception, after which torch calls no ordinary hooks.
            self._hook(module.register_forward_hook(rerun.end, always_call=True))
            for part in module.modules():
                if runs_alone(part, facts):
                    self._attach(part, "forward", partial(in_layer.run, part.forward))
        for visits in every_visits.values():
            layer = visits.layer
            # On the router, which returns the choice, and not on the block: what the hooks select
            # must reach the experts.
            self._hook(layer.router.register_forward_pre_hook(visits.before_router))
            self._hook(layer.router.register_forward_hook(visits.after_router))
            for head in visits.logits_modules():
                self._hook(head.register_forward_hook(visits.note_logits))
            self._hook(layer.block.register_forward_hook(visits.after_block))
            # Last: the decoder layer may be the block.
            self._hook(layer.decoder_layer.register_forward_hook(visits.finish, always_call=True))
            for experts in layer.every_experts:
                self._attach(experts, "_moe_finetune", partial(visits.run_experts_of, experts))
                self._take_over(experts)
                if is_spread(experts):  # transformers' own exchange between ranks
                    self._attach(experts, "forward", MethodType(type(experts).forward, experts))
            inner, wrappers = parameter_wrappers(layer.outer_experts)
            if wrappers:
                # PEFT's wrapper would build W + s B A; call the experts themselves instead.
                self._attach(layer.outer_experts, "forward", inner)
        for wrapper in wrapped_linears(self.model):
            self._attach(wrapper, "forward", partial(run_linear, wrapper, self.dropout))

    def _take_over(self, experts: Any) -> None:
        """Make the experts run by our function, on a copy of their possibly shared config."""
        shared = experts.config
        experts.config = copy.copy(shared)
        experts.config._experts_implementation = IMPLEMENTATION
        self._undo.append(partial(setattr, experts, "config", shared))

    def _check_kernel(self) -> None:
        """Refuse a kernel that cannot run here; warn if a GPU must run without the grouped one."""
        experts = self.layers[0].experts
        up, down = experts.down_proj, experts.down_proj
        if up.dim() == 3:
            up, down = stacks(experts)
        if up.dim() != 3 or grouped_products(self.kernel, up, down):
            return  # partitioned weights have their shape only in the forward
        if self.kernel == "auto" and up.device.type == "cuda":
            log.warning(
                "experts of shapes %s and %s in %s cannot use the grouped kernel (widths must "
                "be multiples of 16 bytes): they run one at a time, which is slow",
                tuple(up.shape),
                tuple(down.shape),
                up.dtype,
            )

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _attach(self, module: nn.Module, name: str, value: Any) -> None:
        if name in module.__dict__:
            self._undo.append(partial(module.__dict__.__setitem__, name, module.__dict__[name]))
        else:
            self._undo.append(partial(module.__dict__.pop, name))
        module.__dict__[name] = value

    # -- one forward --------------------------------------------------------------------------

    def _note_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Keep input ids and labels: a composite passes only embeddings to its language part."""
        self._labels = kwargs.get("labels")
        self._ids = kwargs.get("input_ids", args[0] if args else None)
        # A composite may build its language part's masks itself.
        layout = read_layout(args, kwargs)
        if not is_packed(layout):
            return args, kwargs
        self._mask = kwargs.get("attention_mask") if layout.counted_BS is not None else None
        return args, tell_positions(kwargs, layout)

    def _forget_inputs(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._labels = self._ids = self._mask = None

    def _start(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Decided once, here, so that a recomputation cannot decide otherwise. Gradients are the
        # sign: TRL computes its reference in train mode without them, and that is no training.
        train = module.training and torch.is_grad_enabled()
        labels = self._labels
        ids = self._ids
        plan = self.plan
        if train:
            use_cache = kwargs.get("use_cache")
            if use_cache is None:
                use_cache = getattr(module.config, "use_cache", False)
            check_layers(self.backbone.layers, use_cache)
        layout, facts = read_layout(args, kwargs, ids), self.layers[0].family.rows
        dtype = next(module.parameters()).dtype
        kwargs, sequences, packed = separate(kwargs, layout, module.config, dtype, facts)
        checkpointed = torch.is_grad_enabled() and checkpoints(self.backbone.layers)
        if checkpointed and (own_weights := self.layers[0].family.own_weights) and not self._said:
            self._said = True
            log.warning(
                "WARNING: under gradient checkpointing, %s selects experts again in the backward "
                "and cannot keep those of the forward: %s; routing/changed_in_recomputation is the "
                "share of tokens with others",
                self.layers[0].family.title,
                own_weights,
            )
        context = ForwardContext(
            plan=plan,
            train=train and (plan.objective is not None or self.perturbation is not None),
            observe=bool(plan.observers) and (train or plan.observe == "all"),
            scale=plan.scale() if train and plan.objective is not None else 0.0,
            tokens=None,
            overrides=plan.overrides(len(layout.like_BS)),
            sequences=sequences,
            packed=packed,
            checkpoints=checkpointed,
            training=train,
        )
        if context.wanted:
            context.tokens = read_tokens(
                layout if self._mask is None else layout.with_mask(self._mask),
                pad_token_id=getattr(module.config, "pad_token_id", None),
                labels_BS=labels,
                count_labels=train and plan.token_mask == "labels",
            )
        return args, {**kwargs, CONTEXT_KEY: context}

    def _take_context(
        self,
        layer: MoeLayer | None,
        in_layer: InLayer,
        rerun: RunsAgain,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> tuple[tuple, dict]:
        # An argument and not an attribute of the model: two forwards may run before one backward,
        # and checkpointing hands each layer the arguments of its own forward again.
        context = kwargs.pop(CONTEXT_KEY, None)
        if layer is not None and context is None and self._expects_context(module):
            raise CaptureError(
                f"layer {layer.index} ran outside its model's forward, so its losses and records "
                "would be lost; call the model, or the decoder below its head"
            )
        enter = partial(_enter, layer, in_layer, context)
        enter()
        rerun.begin(enter)
        return args, kwargs

    def _expects_context(self, module: nn.Module) -> bool:
        plan = self.plan
        if plan.observers and plan.observe == "all":
            return True
        acts = plan.objective is not None or self.perturbation is not None or plan.observers
        return bool(acts) and module.training and torch.is_grad_enabled()


def _enter(layer: MoeLayer | None, in_layer: InLayer, context: ForwardContext | None) -> None:
    """Give a layer that begins, or begins again in the backward, its forward's context."""
    in_layer.sequences = None if context is None else context.sequences
    if layer is None:
        return
    layer.clear()
    if context is not None and context.train and not torch.is_grad_enabled():
        # Other programs wrap checkpoint functions, so only the layer shows which kind runs.
        raise CaptureError(REENTRANT)
    if context is not None and context.copied:
        raise CaptureError(
            f"layer {layer.index} received a copy of the forward's context, so losses "
            "between layers would be lost: a wrapper of this layer copies keyword "
            "arguments; remove the wrapper"
        )
    layer.context = context


def _experts_function(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The experts function ``moe_finetune`` in transformers; calls the recorded layer's."""
    run = self.__dict__.get("_moe_finetune")
    if run is None:
        raise CaptureError(
            "experts_implementation 'moe_finetune' is set on a model that is not being recorded; "
            "use SpecializationCallback or Recorder, or set another implementation"
        )
    return run(hidden_states, top_k_index, top_k_weights)
