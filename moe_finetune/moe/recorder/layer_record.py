"""Build the record of one layer's forward from what its hooks stored."""

from typing import Any

from moe_finetune.errors import CaptureError
from moe_finetune.losses.record import Projection, ProjectionFactors, RoutingRecord
from moe_finetune.moe.context import ForwardContext
from moe_finetune.moe.experts.forward import LoraFactors
from moe_finetune.moe.experts.lora_factors import router_weight
from moe_finetune.moe.large.spread_experts import local, spread_of
from moe_finetune.moe.layers import MoeLayer, is_concatenated, stacks


def make_record(layer: MoeLayer, context: ForwardContext) -> RoutingRecord:
    """The record of the block that has just run, for losses and observers."""
    if layer.router_output is None or layer.result is None or layer.router_input is None:
        raise CaptureError(
            f"layer {layer.index}: the block ran without its router or its experts; check for "
            "another experts implementation or kernel and remove it"
        )
    assert context.tokens is not None
    logits_TE, weights_TK, index_TK, own_index_TK = layer.router_output
    result = layer.result
    rows_RH = router_weight(layer.router, layer.places.router_weight)
    return RoutingRecord(
        layer=layer.index,
        inputs_TH=layer.router_input,
        logits_TE=logits_TE.float(),
        index_TK=index_TK,
        own_index_TK=own_index_TK,
        weights_TK=weights_TK,
        mask_T=context.tokens.mask_T,
        score=layer.family.score,
        # rows beyond the routed experts' belong to shared ones
        router_weight_EH=rows_RH[: logits_TE.shape[1]],
        token_ids_T=context.tokens.ids_T,
        sequence_lengths=context.tokens.sequence_lengths,
        activations_TKD=result.activations_TKD,
        outputs_TKH=result.outputs_TKH,
        activations_gram_TKK=result.activations_gram_TKK,
        outputs_gram_TKK=result.outputs_gram_TKK,
        expert_factors=layer.projection,
    )


def projection_factors(
    experts: Any, up: LoraFactors | None, down: LoraFactors | None, name: Projection
) -> ProjectionFactors:
    """Effective projection ``gate``, ``up`` or ``down`` of all experts, as unmerged factors."""
    spread = spread_of(experts)
    gate_up, down_proj = map(local, stacks(experts))
    if name == "down":
        weight = down_proj
        lora = down
        rows = slice(None)
    else:
        weight = gate_up
        lora = up
        rows = _rows_of(experts, name, gate_up.shape[1])
    weight = weight[:, rows] if spread is None else spread.all(weight[:, rows])
    if lora is None:
        return ProjectionFactors(weight)
    experts_count = len(weight)  # one factor may be shared by all
    a_ErI, b_EOr = (one.expand(experts_count, -1, -1) for one in (lora.a_ErI, lora.b_EOr))
    return ProjectionFactors(weight, a_ErI, b_EOr[:, rows], lora.scaling)


def _rows_of(experts: Any, name: Projection, rows: int) -> slice:
    if not experts.has_gate:
        if name == "gate":
            raise CaptureError(f"{type(experts).__name__} has no gate projection")
        return slice(None)
    if not is_concatenated(experts):
        return slice(0 if name == "gate" else 1, None, 2)
    return slice(0, rows // 2) if name == "gate" else slice(rows // 2, None)
