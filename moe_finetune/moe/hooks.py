"""Make a model's MoE layers hand over what they compute, and put everything back afterwards.

Installed on one model instance:

1. backbone pre-hook: makes the forward's :class:`ForwardContext` and passes it down;
2. decoder-layer pre-hook: takes it out of the keyword arguments for the hooks below;
3. router hooks: perturb the input, re-select with a bias, and note logits, weights and index;
4. experts: transformers' registered experts function, with LoRA beside the frozen stack;
5. block hook: builds the record, evaluates the objective, injects it at the block's output.

Nothing global is replaced, and :meth:`Recorder.restore` leaves the model as it was.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_finetune.errors import CaptureError
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import Projection, ProjectionFactors, RoutingRecord
from moe_finetune.losses.tensors import without_autocast
from moe_finetune.moe.checkpointing import check_block, check_layers, inside
from moe_finetune.moe.context import CONTEXT_KEY, ForwardContext
from moe_finetune.moe.experts import LoraFactors, run_experts
from moe_finetune.moe.grouped import Kernel, grouped_products
from moe_finetune.moe.inject import Apart, inject
from moe_finetune.moe.layers import (
    MoeLayer,
    activation_of,
    backbone_of,
    causal_lm,
    check_experts,
    moe_layers,
    stacks,
)
from moe_finetune.moe.lora_factors import (
    expert_factors,
    parameter_wrappers,
    router_weight,
    stored_router_weight,
    variants,
)
from moe_finetune.moe.lora_linear import run_linear, wrapped_linears
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.tokens import read_tokens

log = logging.getLogger(__name__)
IMPLEMENTATION = "moe_finetune"

Observer = Callable[[RoutingRecord, LayerLoss], None]


class Recorder:
    """Context manager that installs the hooks on ``model`` and restores it on exit.

    Args:
        model: a transformers causal language model, PEFT model or wrapped one.
        objective: loss terms to inject while training, or None.
        observers: called once per layer and forward with the record and the layer's loss.
        needs: parts of the record that the observers read beyond the router's tensors.
        observe: "train" records training forwards alone, "all" every forward.
        perturbation: changes to routing.
        token_mask: which tokens count: "attention", or "labels" (those that are trained on).
        dropout: LoRA dropout inside the experts.
        kernel: the experts' products: "grouped" is one call for all experts, as on GPUs, "loop"
            one product an expert; "auto" takes the first on GPUs and the second elsewhere.

    Attributes:
        scale: returns the injected loss's factor for the coming forward; 1 by default.
        apart: takes the coming forward's losses by term, none of which then acts by itself; None
            injects their sum.
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
        self.objective = objective
        self.observers = list(observers)
        self.needs = needs
        self.observe = observe
        self.perturbation = perturbation
        self.token_mask = token_mask
        self.dropout = dropout
        self.kernel: Kernel = kernel
        self.scale: Callable[[], float] = lambda: 1.0
        self.apart: Apart | None = None
        self.layers = moe_layers(model)
        self._last = self.layers[-1].index
        self._labels: Tensor | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether the hooks are on the model."""
        return bool(self._undo)

    # -- installing ---------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def install(self) -> None:
        """Install all hooks; on any error the model is left as it was."""
        if self._undo:
            return
        try:
            self._install()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Remove everything that :meth:`install` added."""
        while self._undo:
            self._undo.pop()()
        for layer in self.layers:
            layer.clear()
        self._labels = None

    def _install(self) -> None:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_function)
        for layer in self.layers:
            check_block(layer.block, layer.index)
            check_experts(layer)
            if "_moe_finetune" in layer.experts.__dict__:
                raise CaptureError("this model is being recorded already; restore it first")
        self._check_kernel()
        if self.perturbation is not None:
            self.perturbation.install(self.model)
        self._hook(self.backbone.register_forward_pre_hook(self._start, with_kwargs=True))
        if self.token_mask == "labels":
            below_peft = causal_lm(self.model)  # which gets the labels of soft prompts, too
            self._hook(below_peft.register_forward_pre_hook(self._note_labels, with_kwargs=True))
        by_module = {id(layer.decoder_layer): layer for layer in self.layers}
        for module in map(inside, self.backbone.layers):
            found = by_module.get(id(module))
            self._hook(
                module.register_forward_pre_hook(
                    partial(self._take_context, found), with_kwargs=True
                )
            )
        for layer in self.layers:
            self._hook(layer.router.register_forward_pre_hook(partial(self._before_router, layer)))
            self._hook(layer.router.register_forward_hook(partial(self._after_router, layer)))
            for head in self._logits_modules(layer):
                self._hook(head.register_forward_hook(partial(_note_logits, layer)))
            self._hook(layer.block.register_forward_hook(partial(self._after_block, layer)))
            # Last: the decoder layer may be the block.
            finish = partial(_finish, layer)
            self._hook(layer.decoder_layer.register_forward_hook(finish, always_call=True))
            for experts in layer.every_experts:
                self._attach(experts, "_moe_finetune", partial(self._run_experts, layer, experts))
                self._take_over(experts)
            inner, wrappers = parameter_wrappers(layer.outer_experts)
            if wrappers:
                # PEFT's wrapper would build W + s B A; call the experts themselves instead.
                self._attach(layer.outer_experts, "forward", inner)
        for wrapper in wrapped_linears(self.model):
            self._attach(wrapper, "forward", partial(run_linear, wrapper, self.dropout))

    def _take_over(self, experts: Any) -> None:
        """Let the experts run by our function: on a config of their own, which others may share."""
        shared = experts.config
        experts.config = copy.copy(shared)
        experts.config._experts_implementation = IMPLEMENTATION
        self._undo.append(partial(setattr, experts, "config", shared))

    def _check_kernel(self) -> None:
        """Refuse a kernel that cannot run here, and say when a GPU has to do without its own."""
        experts = self.layers[0].experts
        up, down = experts.down_proj, experts.down_proj
        if up.dim() == 3:
            up, down = stacks(experts)
        if up.dim() != 3 or grouped_products(self.kernel, up, down):
            return  # partitioned weights have their shape in the forward alone
        if self.kernel == "auto" and up.device.type == "cuda":
            log.warning(
                "experts of shapes %s and %s in %s cannot use the grouped kernel (widths must be "
                "multiples of 16 bytes): they run one by one, which is slow",
                tuple(up.shape),
                tuple(down.shape),
                up.dtype,
            )

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _attach(self, module: nn.Module, name: str, value: Any) -> None:
        module.__dict__[name] = value
        self._undo.append(partial(module.__dict__.pop, name))

    # -- one forward --------------------------------------------------------------------------

    def _note_labels(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._labels = kwargs.get("labels")

    def _start(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        train = module.training and torch.is_grad_enabled()
        labels, self._labels = self._labels, None
        if train:
            use_cache = kwargs.get("use_cache")
            if use_cache is None:
                use_cache = getattr(module.config, "use_cache", False)
            check_layers(self.backbone.layers, use_cache)
        context = ForwardContext(
            train=train and (self.objective is not None or self.perturbation is not None),
            observe=bool(self.observers) and (train or self.observe == "all"),
            scale=self.scale() if train and self.objective is not None else 0.0,
            tokens=None,
            apart=self.apart,
        )
        if context.wanted:
            context.tokens = read_tokens(
                args,
                kwargs,
                pad_token_id=getattr(module.config, "pad_token_id", None),
                labels_BL=labels,
                count_labels=train and self.token_mask == "labels",
            )
        return args, {**kwargs, CONTEXT_KEY: context}

    def _take_context(
        self, layer: MoeLayer | None, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        context = kwargs.pop(CONTEXT_KEY, None)
        if layer is None:
            return args, kwargs
        layer.clear()
        if context is None and self._expects_context(module):
            raise CaptureError(
                f"layer {layer.index} was run without its model's own forward, so its losses and "
                "records would be lost; call the model, or the decoder below its head"
            )
        if context is not None and context.copied:
            raise CaptureError(
                f"layer {layer.index} got a copy of what the forward hands from layer to layer, "
                "and losses between layers would be lost: a wrapper of this layer copies keyword "
                "arguments; remove it"
            )
        layer.context = context
        return args, kwargs

    def _expects_context(self, module: nn.Module) -> bool:
        if self.observers and self.observe == "all":
            return True
        acts = self.objective is not None or self.perturbation is not None or self.observers
        return bool(acts) and module.training and torch.is_grad_enabled()

    def _before_router(self, layer: MoeLayer, module: nn.Module, args: tuple) -> tuple:
        context = layer.context
        hidden = args[0]
        if context is not None and context.wanted:
            layer.router_input = hidden.reshape(-1, hidden.shape[-1])
        if context is not None and context.train and self.perturbation is not None:
            hidden = self.perturbation.router_input(layer, hidden)
        # A router that trains in full is float32 in a bfloat16 model.
        weight = stored_router_weight(layer.router, layer.family.router_weight)
        return (hidden.to(weight.dtype), *args[1:])

    def _logits_modules(self, layer: MoeLayer) -> list[nn.Module]:
        path = layer.family.router_logits
        return [each.get_submodule(path) for each in variants(layer.router)] if path else []

    def _after_router(self, layer: MoeLayer, module: nn.Module, args: tuple, output: Any) -> Any:
        returns = layer.family.router_returns
        given = output if isinstance(output, tuple) else (output,)
        if len(given) != len(returns):
            raise CaptureError(
                f"layer {layer.index}: the router of this {layer.family.title} does not return "
                f"({', '.join(returns)}); this transformers version is not supported"
            )
        named = dict(zip(returns, given, strict=True))
        if "logits" in named:
            layer.router_logits = named["logits"]
        if "index" not in named:
            return output  # selected outside of the router: taken at the experts
        routed = self._route(layer, named["weights"], named["index"])
        named["weights"], named["index"] = routed
        return tuple(named[name] for name in returns)

    def _route(self, layer: MoeLayer, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and index that the experts get; noted with the logits."""
        logits, layer.router_logits = layer.router_logits, None
        if logits is None:
            raise CaptureError(f"layer {layer.index}: the experts ran without their router")
        if self.perturbation is not None:
            weights, index = self.perturbation.routing(layer, logits, weights, index)
        if layer.context is not None and layer.context.wanted:
            layer.router_output = (logits, weights, index)
        return weights, index

    def _run_experts(
        self,
        layer: MoeLayer,
        experts: Any,
        hidden_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        context = layer.context
        if "index" not in layer.family.router_returns:
            weights_TK, index_TK = self._route(layer, weights_TK, index_TK)
        _, wrappers = parameter_wrappers(layer.outer_experts)
        gate_up, down_proj = stacks(experts)
        dtype = gate_up.dtype
        grouped = grouped_products(self.kernel, gate_up, down_proj)
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        up = expert_factors(wrappers.get(first), dtype, self.dropout, grouped)
        down = expert_factors(wrappers.get("down_proj"), dtype, self.dropout, grouped)
        needs: frozenset[str] = frozenset()
        expert_dropout = 0.0
        if context is not None:
            if context.train and self.objective is not None:
                needs |= self.objective.needs_of(layer.index)
            if context.observe:
                needs |= self.needs
            if context.train and self.perturbation is not None:
                expert_dropout = self.perturbation.expert_dropout
        result = run_experts(
            hidden_TH,
            index_TK,
            weights_TK,
            gate_up,
            down_proj,
            activation_of(experts),
            up,
            down,
            needs,
            expert_dropout,
            grouped,
            getattr(experts, f"{first}_bias") if experts.has_bias else None,
            experts.down_proj_bias if experts.has_bias else None,
        )
        if context is not None and context.wanted:
            layer.result = result
            layer.projection = partial(_projection, experts, up, down)
        return result.out_TH

    def _after_block(self, layer: MoeLayer, module: nn.Module, args: tuple, output: Any) -> Any:
        context = layer.context
        if context is None or not context.wanted:
            return output
        if layer.router_output is None or layer.result is None or layer.router_input is None:
            raise CaptureError(
                f"layer {layer.index}: the block ran without its router or its experts; "
                "is another experts implementation or kernel installed on it?"
            )
        first_visit = layer.index not in context.seen
        record = self._record(layer, context)
        below = context.previous.get(layer.index)
        if below is None and self._reads_below(layer, context):
            raise CaptureError(
                f"layer {layer.index} found nothing from the MoE layer below, which its coupling "
                "loss reads; was that layer skipped in this forward?"
            )
        loss = LayerLoss()
        if context.train and self.objective is not None:
            with without_autocast(record.logits_TE.device):
                loss = self.objective(
                    record,
                    LayerContext(
                        previous=below,
                        first_visit=first_visit,
                        draws=context.draws.setdefault(layer.index, {}),
                    ),
                )
        left = self._for_next(layer, context, record)
        if first_visit:
            context.seen.add(layer.index)
            self._leave(layer, context, left, below)
            if context.observe:
                with torch.no_grad():
                    for observer in self.observers:
                        observer(record, loss)
        layer.router_output = layer.router_input = layer.result = layer.projection = None
        total = loss.total
        if total is None:
            return output
        if context.apart is not None:
            return context.apart.inject(output, loss.weighted, context.scale, first_visit)
        return inject(output, total, context.scale)

    def _reads_below(self, layer: MoeLayer, context: ForwardContext) -> bool:
        if not context.train or self.objective is None or layer.index == self.layers[0].index:
            return False
        return "previous" in self.objective.needs_of(layer.index)

    def _record(self, layer: MoeLayer, context: ForwardContext) -> RoutingRecord:
        assert layer.router_output and layer.result and layer.router_input is not None
        assert context.tokens is not None
        logits, weights, index = layer.router_output
        result = layer.result
        weight_EH = router_weight(layer.router, layer.family.router_weight)
        return RoutingRecord(
            layer=layer.index,
            inputs_TH=layer.router_input,
            logits_TE=logits.float(),
            index_TK=index,
            weights_TK=weights,
            mask_T=context.tokens.mask_T,
            score=layer.family.score,
            # Rows beyond the experts' are of shared ones.
            router_weight_EH=weight_EH[: logits.shape[1]],
            token_ids_T=context.tokens.ids_T,
            sequence_lengths=context.tokens.sequence_lengths,
            activations_TKD=result.activations_TKD,
            outputs_TKH=result.outputs_TKH,
            activations_gram_TKK=result.activations_gram_TKK,
            outputs_gram_TKK=result.outputs_gram_TKK,
            expert_factors=layer.projection,
        )

    def _for_next(
        self, layer: MoeLayer, context: ForwardContext, record: RoutingRecord
    ) -> PreviousLayer | None:
        """What the next MoE layer reads of this one.

        Made on every visit: a recomputation must save the tensors that the first visit saved.
        """
        if not context.train or self.objective is None or "previous" not in self.objective.needs:
            return None
        if layer.index == self._last:
            return None
        return PreviousLayer(layer.index, record.distribution_TE, record.index_TK)

    def _leave(
        self,
        layer: MoeLayer,
        context: ForwardContext,
        left: PreviousLayer | None,
        below: PreviousLayer | None,
    ) -> None:
        """Stash what the next layer reads; free the graph of what this one has read.

        Kept by the layer that will read it. A recomputation needs the values alone, so once read
        they are replaced by a leaf: the graph behind them would otherwise hang in a cycle.
        """
        if below is not None:
            seen = below.distribution_TE
            leaf = seen.detach().requires_grad_(seen.requires_grad)
            context.previous[layer.index] = PreviousLayer(below.layer, leaf, below.index_TK)
        if left is not None:
            following = next(item.index for item in self.layers if item.index > layer.index)
            context.previous[following] = left


def _experts_function(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Transformers' experts function of the name ``moe_finetune``: the layer's own, if recorded."""
    run = self.__dict__.get("_moe_finetune")
    if run is None:
        raise CaptureError(
            "experts_implementation 'moe_finetune' is set on a model that is not being recorded; "
            "use SpecializationCallback or Recorder, or set another implementation"
        )
    return run(hidden_states, top_k_index, top_k_weights)


def _note_logits(layer: MoeLayer, module: nn.Module, args: tuple, output: Tensor) -> None:
    layer.router_logits = output


def _finish(layer: MoeLayer, module: nn.Module, args: tuple, output: Any) -> None:
    layer.clear()


def _projection(
    experts: Any, up: LoraFactors | None, down: LoraFactors | None, name: Projection
) -> ProjectionFactors:
    """Effective projection ``gate``, ``up`` or ``down`` of all experts, unbuilt."""
    gate_up, down_proj = stacks(experts)
    if name == "down":
        weight, lora, rows = down_proj, down, slice(None)
    else:
        weight, lora, rows = gate_up, up, _rows_of(experts, name, gate_up.shape[1])
    if lora is None:
        return ProjectionFactors(weight[:, rows])
    return ProjectionFactors(weight[:, rows], lora.a_ErI, lora.b_EOr[:, rows], lora.scaling)


def _rows_of(experts: Any, name: Projection, rows: int) -> slice:
    """The rows of the stacked gate and up projections that are one of them."""
    if not experts.has_gate:
        if name == "gate":
            raise CaptureError(f"{type(experts).__name__} has no gate projection")
        return slice(None)
    if not experts.is_concatenated:
        return slice(0 if name == "gate" else 1, None, 2)
    return slice(0, rows // 2) if name == "gate" else slice(rows // 2, None)
