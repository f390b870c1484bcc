"""One MoE layer's part in a forward: router, experts and block, noted and made into its record.

The hooks of :mod:`moe_finetune.moe.hooks` call these in the order in which the layer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_finetune.errors import CaptureError
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.inject import inject
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import Projection, ProjectionFactors, RoutingRecord
from moe_finetune.losses.tensors import without_autocast
from moe_finetune.moe.context import ForwardContext
from moe_finetune.moe.experts import Experts, ExpertsResult, LoraFactors, run_experts
from moe_finetune.moe.grouped import Kernel, grouped_products
from moe_finetune.moe.layers import MoeLayer, activation_of, is_concatenated, stacks
from moe_finetune.moe.lora_factors import (
    expert_factors,
    parameter_wrappers,
    router_weight,
    stored_router_weight,
    variants,
)
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.self_ranking import check_plain, run_self_ranking
from moe_finetune.moe.spread import local, run_spread, spread_of

Observer = Callable[[RoutingRecord, LayerLoss], None]


class Recording(Protocol):
    """What a visit reads of its recorder; it may change between forwards."""

    layers: list[MoeLayer]
    objective: Objective | None
    observers: list[Observer]
    needs: frozenset[str]
    perturbation: Perturbation | None
    dropout: float
    kernel: Kernel


class LayerVisits:
    """What a recorder does at one layer, in every forward.

    Args:
        recorder: whose objective, observers and perturbation act.
        layer: what the visit in progress notes is kept on it.
    """

    def __init__(self, recorder: Recording, layer: MoeLayer):
        self.recorder, self.layer = recorder, layer

    def before_router(self, module: nn.Module, args: tuple) -> tuple:
        layer, recorder = self.layer, self.recorder
        context = layer.context
        hidden = args[0]
        if context is not None and context.wanted:
            layer.router_input = hidden.reshape(-1, hidden.shape[-1])
        if context is not None and context.train and recorder.perturbation is not None:
            hidden = recorder.perturbation.router_input(layer, hidden)
        # A router that trains in full is float32 in a bfloat16 model.
        weight = stored_router_weight(layer.router, layer.family.router_weight)
        return (hidden.to(weight.dtype), *args[1:])

    def logits_modules(self) -> list[nn.Module]:
        layer = self.layer
        path = layer.family.router_logits
        return [each.get_submodule(path) for each in variants(layer.router)] if path else []

    @property
    def router_selects(self) -> bool:
        """Whether the router itself returns the selected experts."""
        return "index" in self.layer.family.router_returns

    def after_router(self, module: nn.Module, args: tuple, output: Any) -> Any:
        layer = self.layer
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
        if not self.router_selects:
            return output  # selected between router and experts: taken at the experts
        routed = self._route(named["weights"], named["index"])
        named["weights"], named["index"] = routed
        return tuple(named[name] for name in returns)

    def _route(self, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and index that the experts get; noted with the logits."""
        layer, recorder = self.layer, self.recorder
        logits, layer.router_logits = layer.router_logits, None
        if logits is None:
            raise CaptureError(f"layer {layer.index}: the experts ran without their router")
        if recorder.perturbation is not None:
            weights, index = recorder.perturbation.routing(layer, logits, weights, index)
        if layer.context is not None and layer.context.given.route is not None:
            weights, index = layer.context.given.route(layer, logits, weights, index)
        if layer.context is not None and layer.context.wanted:
            layer.router_output = (logits, weights, index)
        return weights, index

    def before_experts(self, module: nn.Module, args: tuple) -> tuple:
        """Reroute the arguments of experts that run themselves behind a router of scores."""
        hidden_TH, index_TK, weights_TK, *rest = args
        weights_TK, index_TK = self._route(weights_TK, index_TK)
        return (hidden_TH, index_TK, weights_TK, *rest)

    def run_experts_of(
        self,
        experts: Any,
        hidden_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        *projected: Tensor,
    ) -> Tensor:
        layer, recorder = self.layer, self.recorder
        context = layer.context
        if not self.router_selects:
            weights_TK, index_TK = self._route(weights_TK, index_TK)
        _, wrappers = parameter_wrappers(layer.outer_experts)
        needs, expert_dropout = self._asked_of_experts()
        if layer.family.self_ranking:
            check_plain(layer, wrappers, expert_dropout)
            result = run_self_ranking(experts, hidden_TH, index_TK, weights_TK, projected, needs)
            if context is not None and context.wanted:
                layer.result = result
            return result.out_TH
        spread = spread_of(experts)
        gate_up, down_proj = map(local, stacks(experts))
        dtype = gate_up.dtype
        grouped = grouped_products(recorder.kernel, gate_up, down_proj)
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        up = expert_factors(wrappers.get(first), dtype, recorder.dropout, grouped)
        down = expert_factors(wrappers.get("down_proj"), dtype, recorder.dropout, grouped)
        own = Experts(
            gate_up_E2DH=gate_up,
            down_EHD=down_proj,
            activation=activation_of(experts),
            lora_up=up,
            lora_down=down,
            bias_up_E2D=local(getattr(experts, f"{first}_bias")) if experts.has_bias else None,
            bias_down_EH=local(experts.down_proj_bias) if experts.has_bias else None,
            dropout=expert_dropout,
            grouped=grouped,
        )
        run = run_experts if spread is None else partial(run_spread, spread)
        if recorder.perturbation is not None:
            outputs_of = partial(_outputs, run, replace(own, dropout=0.0), hidden_TH)
            weights_TK, index_TK = recorder.perturbation.at_experts(
                layer, outputs_of, weights_TK, index_TK
            )
            if layer.router_output is not None:
                layer.router_output = (layer.router_output[0], weights_TK, index_TK)
        result = run(hidden_TH, index_TK, weights_TK, own, needs)
        if context is not None and context.wanted:
            layer.result = result
            layer.projection = partial(_projection, experts, up, down)
        return result.out_TH

    def _asked_of_experts(self) -> tuple[frozenset[str], float]:
        """What losses and observers read of the experts, and the dropout on their activations."""
        layer, recorder, context = self.layer, self.recorder, self.layer.context
        needs: frozenset[str] = frozenset()
        expert_dropout = 0.0
        if context is not None:
            if context.train and recorder.objective is not None:
                needs |= recorder.objective.needs_of(layer.index)
            if context.observe:
                needs |= recorder.needs
            if context.train and recorder.perturbation is not None:
                expert_dropout = recorder.perturbation.expert_dropout
        return needs, expert_dropout

    def after_block(self, module: nn.Module, args: tuple, output: Any) -> Any:
        layer, recorder = self.layer, self.recorder
        context = layer.context
        if context is None or not context.wanted:
            return output
        if layer.router_output is None or layer.result is None or layer.router_input is None:
            raise CaptureError(
                f"layer {layer.index}: the block ran without its router or its experts; "
                "is another experts implementation or kernel installed on it?"
            )
        first_visit = layer.index not in context.seen
        objective = recorder.objective if context.train else None
        record = self._record(context)
        below = context.previous.get(layer.index)
        if below is None and self._reads_below(objective):
            raise CaptureError(
                f"layer {layer.index} found nothing from the MoE layer below, which its coupling "
                "loss reads; was that layer skipped in this forward?"
            )
        loss = LayerLoss()
        if objective is not None:
            with without_autocast(record.logits_TE.device):
                loss = objective(
                    record,
                    LayerContext(
                        previous=below,
                        first_visit=first_visit,
                        draws=context.draws.setdefault(layer.index, {}),
                        teacher_logits_TE=context.given.teacher.get(layer.index),
                    ),
                )
        left = self._for_next(objective, record)
        if first_visit:
            context.seen.add(layer.index)
            self._leave(context, left, below)
            if context.observe:
                with torch.no_grad():
                    for observer in recorder.observers:
                        observer(record, loss)
        layer.router_output = layer.router_input = layer.result = layer.projection = None
        total = loss.total
        if total is None:
            return output
        if context.apart is not None:
            return context.apart.inject(output, loss.weighted, context.scale, first_visit)
        return inject(output, total, context.scale)

    def _reads_below(self, objective: Objective | None) -> bool:
        index = self.layer.index
        if objective is None or index == self.recorder.layers[0].index:
            return False
        return "previous" in objective.needs_of(index)

    def _record(self, context: ForwardContext) -> RoutingRecord:
        layer = self.layer
        assert layer.router_output and layer.result and layer.router_input is not None
        assert context.tokens is not None
        logits, weights, index = layer.router_output
        result = layer.result
        weight_EH = None
        if not layer.family.self_ranking:
            # Rows beyond the experts' are of shared ones.
            rows_RH = router_weight(layer.router, layer.family.router_weight)
            weight_EH = rows_RH[: logits.shape[1]]
        return RoutingRecord(
            layer=layer.index,
            inputs_TH=layer.router_input,
            logits_TE=logits.float(),
            index_TK=index,
            weights_TK=weights,
            mask_T=context.tokens.mask_T,
            score=layer.family.score,
            router_weight_EH=weight_EH,
            token_ids_T=context.tokens.ids_T,
            sequence_lengths=context.tokens.sequence_lengths,
            activations_TKD=result.activations_TKD,
            outputs_TKH=result.outputs_TKH,
            activations_gram_TKK=result.activations_gram_TKK,
            outputs_gram_TKK=result.outputs_gram_TKK,
            expert_factors=layer.projection,
        )

    def _for_next(self, objective: Objective | None, record: RoutingRecord) -> PreviousLayer | None:
        """What the next MoE layer reads of this one.

        Made on every visit: a recomputation must save the tensors that the first visit saved.
        """
        index = self.layer.index
        if objective is None or "previous" not in objective.needs:
            return None
        if index == self.recorder.layers[-1].index:
            return None
        return PreviousLayer(index, record.distribution_TE, record.index_TK)

    def _leave(
        self,
        context: ForwardContext,
        left: PreviousLayer | None,
        below: PreviousLayer | None,
    ) -> None:
        """Stash what the next layer reads; free the graph of what this one has read.

        Kept by the layer that will read it. A recomputation needs the values alone, so once read
        they are replaced by a leaf: the graph behind them would otherwise hang in a cycle.
        """
        layer = self.layer
        if below is not None:
            seen = below.distribution_TE
            leaf = seen.detach().requires_grad_(seen.requires_grad)
            context.previous[layer.index] = PreviousLayer(below.layer, leaf, below.index_TK)
        if left is not None:
            following = next(
                item.index for item in self.recorder.layers if item.index > layer.index
            )
            context.previous[following] = left

    def note_logits(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.layer.router_logits = output

    def finish(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.layer.clear()


def _outputs(
    run: Callable[..., ExpertsResult],
    experts: Experts,
    hidden_TH: Tensor,
    rows: slice,
    index_SN: Tensor,
) -> Tensor:
    """Outputs ``(S, N, H)`` of any experts on some of the tokens."""
    weights_SN = hidden_TH.new_ones(index_SN.shape)
    found = run(hidden_TH[rows], index_SN, weights_SN, experts, frozenset({"outputs"}))
    assert found.outputs_TKH is not None
    return found.outputs_TKH


def _projection(
    experts: Any, up: LoraFactors | None, down: LoraFactors | None, name: Projection
) -> ProjectionFactors:
    """Effective projection ``gate``, ``up`` or ``down`` of all experts, unbuilt."""
    spread = spread_of(experts)
    gate_up, down_proj = map(local, stacks(experts))
    if name == "down":
        weight, lora, rows = down_proj, down, slice(None)
    else:
        weight, lora, rows = gate_up, up, _rows_of(experts, name, gate_up.shape[1])
    weight = weight[:, rows] if spread is None else spread.all(weight[:, rows])
    if lora is None:
        return ProjectionFactors(weight)
    return ProjectionFactors(weight, lora.a_ErI, lora.b_EOr[:, rows], lora.scaling)


def _rows_of(experts: Any, name: Projection, rows: int) -> slice:
    if not experts.has_gate:
        if name == "gate":
            raise CaptureError(f"{type(experts).__name__} has no gate projection")
        return slice(None)
    if not is_concatenated(experts):
        return slice(0 if name == "gate" else 1, None, 2)
    return slice(0, rows // 2) if name == "gate" else slice(rows // 2, None)
