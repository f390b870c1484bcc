"""The losses of one MoE layer, for engines with custom blocks; needs no transformers.

    record = RoutingRecord(
        layer=3, inputs_TH=x, logits_TE=logits, index_TK=index, weights_TK=weights, mask_T=mask,
        score="softmax", router_weight_EH=router.weight, outputs_TKH=expert_outputs,
    )
    loss = layer_loss(record, {"orthogonality": {"weight": 1e-3}})
    return inject(output, loss, scale=1 / micro_batches)

T tokens, E routed experts, K selected, H hidden, D expert width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import ObjectiveError, did_you_mean
from moe_finetune.losses.base import LayerContext, ModelFacts, PreviousLayer
from moe_finetune.losses.gram import gram
from moe_finetune.losses.objective import Objective
from moe_finetune.losses.presets import PRESETS
from moe_finetune.losses.record import RoutingRecord

_VECTORS = {"activations_gram": "activations_TKD", "outputs_gram": "outputs_TKH"}
"""The vectors from which a Gram matrix can be computed."""
_FIELDS = {
    "activations": "activations_TKD",
    "outputs": "outputs_TKH",
    "activations_gram": "activations_gram_TKK",
    "outputs_gram": "outputs_gram_TKK",
    "expert_factors": "expert_factors",
}


def layer_loss(
    record: RoutingRecord,
    method: str | Mapping[str, Mapping[str, Any]],
    previous: RoutingRecord | None = None,
    *,
    moe_layers: Sequence[int] | None = None,
) -> Tensor:
    """The weighted sum of a method's losses in one layer, a float32 scalar with its graph.

    Add it to the loss. If the layer cannot return a loss, pass it to
    :func:`moe_finetune.losses.inject.inject` with the block's output. Gram matrices that the record
    lacks are computed from ``outputs_TKH`` and ``activations_TKD``.

    Args:
        record: the layer's tensors, see :class:`RoutingRecord`, all on one device.
        method: the name of a preset, or options by loss name as under ``method.terms``.
        previous: the record of the MoE layer below, for ``coupling``; None in the first layer.
        moe_layers: decoder indices of all MoE layers, for ``layers`` and ``layers_reduction:
            mean``.

    Raises:
        ObjectiveError: an unknown preset or term; a term that reads a part missing from the record
            or finds its weight in training (``share``, ``target``); ``layers`` or
            ``layers_reduction: mean`` without ``moe_layers``; a preset that also changes routing or
            keeps a bias.
    """
    terms = _terms(method) if isinstance(method, str) else method
    pair = (record.layer, record.layer + 1) if previous is None else (previous.layer, record.layer)
    facts = ModelFacts(
        moe_layers=pair if moe_layers is None else tuple(moe_layers),
        num_experts=record.logits_TE.shape[-1],
        top_k=record.index_TK.shape[-1],
        vocab_size=2**31,
    )
    if moe_layers is None and any(
        options.get("layers", "all") != "all" for options in terms.values()
    ):
        raise ObjectiveError("method.terms: layers of a term needs moe_layers")
    objective = Objective.from_options(terms, facts)
    for term in objective.terms:
        options, name = term.options, f"method.terms.{term.name}"
        if options.finds_weight:
            raise ObjectiveError(f"{name}: a share or target needs a trainer; give it a weight")
        if options.layers_reduction == "mean" and moe_layers is None:
            raise ObjectiveError(f"{name}.layers_reduction: 'mean' needs moe_layers")
    record = _complete(record, objective)
    lower = None
    if previous is not None:
        lower = PreviousLayer(previous.layer, previous.distribution_TE, previous.index_TK)
    total = objective(record, LayerContext(previous=lower)).total
    return torch.zeros((), device=record.logits_TE.device) if total is None else total


def _terms(preset: str) -> Mapping[str, Mapping[str, Any]]:
    if preset not in PRESETS:
        raise ObjectiveError(f"unknown preset '{preset}'{did_you_mean(preset, PRESETS)}")
    chosen = PRESETS[preset]
    if chosen.perturbations or chosen.bias_update is not None:
        raise ObjectiveError(
            f"preset '{preset}' also changes routing, which a loss alone cannot; pass only its "
            "terms"
        )
    return chosen.terms


def _complete(record: RoutingRecord, objective: Objective) -> RoutingRecord:
    """``record`` with the Gram matrices that the terms read.

    Raises:
        ObjectiveError: a term reads a missing part; names both.
    """
    for need, field in _VECTORS.items():
        gram_field, vectors = f"{need}_TKK", getattr(record, field)
        if need in objective.needs and getattr(record, gram_field) is None and vectors is not None:
            computed: dict[str, Any] = {gram_field: gram(vectors)}
            record = dataclasses.replace(record, **computed)
    for term in objective.terms:
        for need in term.needs - {"previous"}:
            if getattr(record, _FIELDS[need]) is None:
                raise ObjectiveError(
                    f"method.terms.{term.name}: the record has no "
                    f"{_VECTORS.get(need, _FIELDS[need])}; fill it, or remove the term"
                )
    return record
