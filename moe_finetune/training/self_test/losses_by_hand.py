"""A method's losses computed from a stock forward, which nothing of the recorder touches.

Plain hooks take what a router and its experts get and return; activations and outputs follow from
the experts' effective weights, one token and choice at a time. For small models only.

Shape legend: T tokens, E experts, K selected, H hidden, D expert width.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.objective import Objective
from moe_finetune.losses.record import Projection, ProjectionFactors, RoutingRecord
from moe_finetune.moe.experts.lora_factors import router_weight, variants
from moe_finetune.moe.layers import MoeLayer, is_concatenated, moe_layers
from moe_finetune.moe.recorder.router_results import named_results
from moe_finetune.moe.tokens import Tokens


@dataclass
class Seen:
    """What plain hooks took from one layer of a forward."""

    layer: MoeLayer
    router_input: Tensor | None = None
    logits: Tensor | None = None
    experts: list[tuple[Any, Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)


@contextmanager
def seeing(model: nn.Module) -> Iterator[list[Seen]]:
    """Hooks that take the tensors of each MoE layer in the next forward."""
    seen, hooks = [Seen(layer) for layer in moe_layers(model)], []
    for one in seen:
        layer = one.layer
        path = layer.family.router_logits
        hooks.append(layer.router.register_forward_hook(partial(_after_router, one)))
        for router in variants(layer.router) if path else []:
            head = router.get_submodule(path)
            hooks.append(head.register_forward_hook(partial(_after_head, one)))
        for experts in layer.every_experts:
            take = partial(_before_experts, one)
            hooks.append(experts.register_forward_pre_hook(take, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _after_router(seen: Seen, module: nn.Module, args: tuple, output: Any) -> None:
    layer, results = seen.layer, output if isinstance(output, tuple) else (output,)
    seen.router_input = args[0].reshape(-1, args[0].shape[-1])
    experts = layer.places.num_experts
    named = named_results(layer.family.router_returns, results, experts) or {}
    if "logits" in named:
        seen.logits = named["logits"]


def _after_head(seen: Seen, module: nn.Module, args: tuple, output: Tensor) -> None:
    seen.logits = output


def _before_experts(seen: Seen, module: Any, args: tuple, kwargs: dict) -> None:
    named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False))
    named |= kwargs
    first = "gate_up_proj" if module.has_gate else "up_proj"
    # PEFT's wrappers are around this call: these are the effective weights, with their graph.
    stacks = getattr(module, first), module.down_proj
    if module.is_transposed:
        stacks = tuple(stack.transpose(1, 2) for stack in stacks)
    tensors = (named[f"{name}"] for name in ("hidden_states", "top_k_index", "top_k_weights"))
    seen.experts.append((module, *tensors, *stacks))


def records(seen: list[Seen], tokens: Tokens) -> list[RoutingRecord]:
    """The records of a forward, with everything that a loss may read."""
    return [_record(one, tokens) for one in seen]


def _record(seen: Seen, tokens: Tokens) -> RoutingRecord:
    layer = seen.layer
    module, hidden, index, weights_TK, up_E2DH, down_EHD = seen.experts[-1]
    index_TK = index.reshape(-1, index.shape[-1])
    hidden_TH = hidden.reshape(-1, hidden.shape[-1])
    rows_TKX = torch.einsum("th,tkxh->tkx", hidden_TH, up_E2DH[index_TK])
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        rows_TKX = rows_TKX + bias[index_TK]
    z_TKD = module._apply_gate(rows_TKX) if module.has_gate else module.act_fn(rows_TKX)
    y_TKH = torch.einsum("tkd,tkhd->tkh", z_TKD, down_EHD[index_TK])
    if module.has_bias:
        y_TKH = y_TKH + module.down_proj_bias[index_TK]
    assert seen.logits is not None and seen.router_input is not None
    logits_TE = seen.logits.reshape(len(index_TK), -1).float()
    experts = layer.places.num_experts
    return RoutingRecord(
        layer=layer.index,
        inputs_TH=seen.router_input,
        logits_TE=logits_TE,
        index_TK=index_TK,
        weights_TK=weights_TK.reshape(index_TK.shape),
        mask_T=tokens.mask_T,
        score=layer.family.score,
        router_weight_EH=router_weight(layer.router, layer.places.router_weight)[:experts],
        token_ids_T=tokens.ids_T,
        sequence_lengths=tokens.sequence_lengths,
        activations_TKD=z_TKD,
        outputs_TKH=y_TKH,
        activations_gram_TKK=z_TKD @ z_TKD.transpose(1, 2),
        outputs_gram_TKK=y_TKH @ y_TKH.transpose(1, 2),
        expert_factors=partial(_projection, module, up_E2DH, down_EHD),
    )


def _projection(
    module: Any, up_E2DH: Tensor, down_EHD: Tensor, name: Projection
) -> ProjectionFactors:
    if name == "down":
        return ProjectionFactors(down_EHD)
    half = up_E2DH.shape[1] // 2
    if not module.has_gate:
        return ProjectionFactors(up_E2DH)
    if is_concatenated(module):
        return ProjectionFactors(up_E2DH[:, :half] if name == "gate" else up_E2DH[:, half:])
    return ProjectionFactors(up_E2DH[:, 0 if name == "gate" else 1 :: 2])


def losses(
    objective: Objective, layers: list[RoutingRecord]
) -> tuple[dict[str, Tensor], Mapping[int, dict[str, Tensor]]]:
    """Each term's sum over layers at weight 1, and the random numbers that it drew, by layer."""
    totals: dict[str, Tensor] = {}
    draws: dict[int, dict[str, Tensor]] = {}
    previous: PreviousLayer | None = None
    for record in layers:
        context = LayerContext(previous=previous, draws=draws.setdefault(record.layer, {}))
        result = objective(record, context)
        for name, loss in result.losses.items():
            value = loss * result.at_one[name]
            totals[name] = totals[name] + value if name in totals else value
        previous = PreviousLayer(record.layer, record.distribution_TE, record.index_TK)
    return totals, draws
