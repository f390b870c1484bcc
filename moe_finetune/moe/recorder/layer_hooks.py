"""The hooks of one MoE layer in a forward: router, experts and block.

:mod:`moe_finetune.moe.recorder.hooks` installs them. They run in the order of the layer's
computation and store tensors on the :class:`MoeLayer`, from which the block's hook builds the
record.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import CaptureError
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.inject import inject
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import without_autocast
from moe_finetune.moe.choice.kept_choice import keep_choice
from moe_finetune.moe.choice.select_again import Weighting
from moe_finetune.moe.context import ForwardContext
from moe_finetune.moe.experts.dense_router import DenseScores, Draws
from moe_finetune.moe.experts.forward import Experts, LoraFactors, run_experts
from moe_finetune.moe.experts.grouped_products import Kernel, grouped_products
from moe_finetune.moe.experts.lora_factors import (
    expert_factors,
    parameter_wrappers,
    stored_router_weight,
    variants,
)
from moe_finetune.moe.large.spread_experts import local, run_spread, spread_of
from moe_finetune.moe.layers import MoeLayer, activation_of, stacks
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.layer_record import make_record, projection_factors
from moe_finetune.moe.recorder.router_results import named_results


class LayerVisits:
    """The hooks of one layer, called in every forward; ``layer`` stores the visit's tensors.

    ``layers`` are all MoE layers of the model, in order;
    :class:`~moe_finetune.moe.recorder.hooks.Recorder` has the others.
    """

    def __init__(
        self,
        layer: MoeLayer,
        layers: Sequence[MoeLayer],
        perturbation: Perturbation | None = None,
        dropout: float = 0.0,
        kernel: Kernel = "auto",
    ):
        self.layer, self.perturbation = layer, perturbation
        self.dropout, self.kernel = dropout, kernel
        # Whether the router itself returns the selected experts; its last visit shows it.
        self.router_selects = "index" in layer.family.router_returns
        self._num_experts = layer.places.num_experts
        # Experts that are looked up by token: a router's scores never select others.
        self._fixed = tuple(layer.family.fixed_layers(layer.experts.config))
        self._first = layers[0].index == layer.index
        higher = [other.index for other in layers if other.index > layer.index]
        self._above: int | None = min(higher, default=None)

    def before_router(self, module: nn.Module, args: tuple) -> tuple:
        layer = self.layer
        context = layer.context
        hidden = args[0]
        if context is not None and context.wanted:
            layer.router_input = hidden.reshape(-1, hidden.shape[-1])
        if context is not None and context.train and self.perturbation is not None:
            hidden = self.perturbation.router_input(layer, hidden)
        # A router that trains in full is float32 in a bfloat16 model.
        weight = stored_router_weight(layer.router, layer.places.router_weight)
        return (hidden.to(weight.dtype), *args[1:])

    def logits_modules(self) -> list[nn.Module]:
        layer = self.layer
        path = layer.family.router_logits
        return [router.get_submodule(path) for router in variants(layer.router)] if path else []

    def after_router(self, module: nn.Module, args: tuple, output: Any) -> Any:
        layer = self.layer
        outputs = output if isinstance(output, tuple) else (output,)
        declared = layer.family.router_returns
        named = named_results(declared, outputs, self._num_experts)
        if named is None:
            results = (f"{tuple(r.shape)} {r.dtype}" for r in outputs if torch.is_tensor(r))
            raise CaptureError(
                f"layer {layer.index}: the router of this {layer.family.title} returns "
                f"({'; '.join(results)}), which is not ({', '.join(declared)}); this transformers "
                "version is not supported"
            )
        if "logits" in named:
            layer.router_logits = named["logits"]
        self.router_selects = "index" in named
        if not self.router_selects:
            return output  # selected between router and experts: taken at the experts
        routed = self._route(named["weights"], named["index"])
        named["weights"], named["index"] = routed
        return tuple(named.values())

    def _route(self, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' weights and index, and record them with the logits."""
        layer = self.layer
        logits, layer.router_logits = layer.router_logits, None
        if logits is None:
            raise CaptureError(f"layer {layer.index}: the experts ran without their router")
        if self.perturbation is not None:
            weights, index = self.perturbation.routing(layer, logits, weights, index)
        own_index = index
        if layer.context is not None and layer.context.overrides.route is not None:
            weights, index = layer.context.overrides.route(layer, logits, weights, index)
        weights, index = keep_choice(layer, logits, weights, index)
        layer.dense_scores = self._dense_scores(logits, weights, index)
        if self.perturbation is not None:
            weights = self.perturbation.noise(layer, logits, weights, index)
        if layer.context is not None and layer.context.wanted:
            layer.router_output = (logits, weights, index, own_index)
        return weights, index

    def _dense_scores(
        self, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> DenseScores | None:
        """The weights of unselected experts in this forward; None if their gradient is not used."""
        layer = self.layer
        router = None if layer.context is None else layer.context.dense_router
        if router is None or layer.context is None or layer.index in self._fixed:
            return None
        weights_TE = Weighting(layer).of_unselected(logits_TE, weights_TK, index_TK)
        return DenseScores(weights_TE, Draws(router.sample, (*layer.context.draw, layer.index)))

    def before_experts(self, module: nn.Module, args: tuple) -> tuple:
        """Reroute the arguments of experts that run themselves after a router of scores."""
        if self.router_selects:
            return args
        hidden_TH, index_TK, weights_TK = args
        weights_TK, index_TK = self._route(weights_TK, index_TK)
        return hidden_TH, index_TK, weights_TK

    def run_experts_of(
        self,
        experts: Any,
        hidden_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """The experts' forward: route, run, and store what the record needs."""
        if not self.router_selects:
            weights_TK, index_TK = self._route(weights_TK, index_TK)
        stacks = self._stacks(experts)
        run = partial(run_spread, spread) if (spread := spread_of(experts)) else run_experts
        dense, self.layer.dense_scores = self.layer.dense_scores, None
        options = {} if dense is None else {"dense": dense}  # spread experts are refused
        result = run(hidden_TH, index_TK, weights_TK, stacks, self._needs(), **options)
        context = self.layer.context
        if context is not None and context.wanted:
            self.layer.result = result
            self.layer.projection = partial(
                projection_factors, experts, stacks.lora_up, stacks.lora_down
            )
        return result.out_TH

    def _stacks(self, experts: Any) -> Experts:
        """This rank's expert weights, their LoRA factors, and how to run them."""
        _, wrappers = parameter_wrappers(self.layer.outer_experts)
        gate_up, down_proj = map(local, stacks(experts))
        grouped = grouped_products(self.kernel, gate_up, down_proj)
        first = "gate_up_proj" if experts.has_gate else "up_proj"

        def factors(name: str) -> LoraFactors | None:
            return expert_factors(wrappers.get(name), gate_up.dtype, self.dropout, grouped)

        return Experts(
            gate_up_E2DH=gate_up,
            down_EHD=down_proj,
            activation=activation_of(experts),
            lora_up=factors(first),
            lora_down=factors("down_proj"),
            bias_up_E2D=local(getattr(experts, f"{first}_bias")) if experts.has_bias else None,
            bias_down_EH=local(experts.down_proj_bias) if experts.has_bias else None,
            dropout=self._expert_dropout,
            grouped=grouped,
        )

    def _needs(self) -> frozenset[str]:
        """The experts' results that losses and observers read in this forward."""
        context = self.layer.context
        needs: frozenset[str] = frozenset()
        if context is not None and context.train and context.plan.objective is not None:
            needs |= context.plan.objective.needs_of(self.layer.index)
        if context is not None and context.observe:
            needs |= context.plan.needs
        return needs

    @property
    def _expert_dropout(self) -> float:
        """Dropout on the experts' activations; 0 outside training."""
        context = self.layer.context
        if context is None or not context.train or self.perturbation is None:
            return 0.0
        return self.perturbation.expert_dropout

    def after_block(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Evaluate the losses on the layer's record, and join them at the block's output."""
        layer = self.layer
        context = layer.context
        if context is None or not context.wanted:
            return output
        first_visit = layer.index not in context.seen
        objective = context.plan.objective if context.train else None
        record = make_record(layer, context)
        previous = context.previous.get(layer.index)
        if previous is None and self._reads_below(objective):
            raise CaptureError(
                f"layer {layer.index} has no record of the MoE layer below, which its coupling "
                "loss reads; make sure that this forward does not skip that layer"
            )
        loss = LayerLoss()
        if objective is not None:
            with without_autocast(record.logits_TE.device):
                loss = objective(
                    record,
                    LayerContext(previous, context.draws.setdefault(layer.index, {})),
                )
        passed_up = self._for_next(objective, record)
        if first_visit:
            context.seen.add(layer.index)
            self._pass_up(context, passed_up, previous)
            if context.observe:
                with torch.no_grad():
                    for observer in context.plan.observers:
                        observer(record, loss)
        layer.router_output = layer.router_input = layer.result = layer.projection = None
        if not loss.losses:
            return output
        if context.plan.joins is not None:
            return context.plan.joins.join(output, loss, context.scale, first_visit)
        total = loss.total
        return output if total is None else inject(output, total, context.scale)

    def _reads_below(self, objective: Objective | None) -> bool:
        if objective is None or self._first:
            return False
        return "previous" in objective.needs_of(self.layer.index)

    def _for_next(self, objective: Objective | None, record: RoutingRecord) -> PreviousLayer | None:
        """What the next MoE layer's terms read from this one.

        Built on every visit: a recomputation must save the same tensors as the first visit.
        """
        if objective is None or "previous" not in objective.needs or self._above is None:
            return None
        return PreviousLayer(self.layer.index, record.distribution_TE, record.index_TK)

    def _pass_up(
        self,
        context: ForwardContext,
        passed_up: PreviousLayer | None,
        previous: PreviousLayer | None,
    ) -> None:
        """Store what the next layer reads; free the graph of what this one has read.

        Stored under the index of the reading layer. A recomputation needs only the values, so once
        read they are replaced by a leaf. Otherwise their graph would stay in a reference cycle
        (context -> graph -> checkpoint's arguments -> context) that gc cannot see.
        """
        if previous is not None:
            distribution = previous.distribution_TE
            leaf = distribution.detach().requires_grad_(distribution.requires_grad)
            context.previous[self.layer.index] = PreviousLayer(
                previous.layer, leaf, previous.index_TK
            )
        if passed_up is not None and self._above is not None:
            context.previous[self._above] = passed_up

    def note_logits(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.layer.router_logits = output

    def after_layer(self, output: Any) -> Any:
        """Evaluate the losses inside of what runs again, where the decoder layer is the block.

        Its hook is outside, and would keep the tensors that losses read.
        """
        layer = self.layer
        return (
            self.after_block(layer.block, (), output)
            if layer.block is layer.decoder_layer
            else output
        )

    def finish(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.layer.clear()
