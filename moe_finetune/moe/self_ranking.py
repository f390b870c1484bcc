"""Run experts that rank themselves, and collect what losses and metrics read."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.moe.by_token import gram
from moe_finetune.moe.experts import ExpertsResult
from moe_finetune.moe.layers import MoeLayer


def check_plain(layer: MoeLayer, wrappers: Collection[str], expert_dropout: float) -> None:
    """Raise CaptureError if adapters or dropout inside the experts would be ignored."""
    title = layer.family.title
    if wrappers:
        raise CaptureError(
            f"layer {layer.index}: the experts of {title} train in full, but there is an adapter "
            f"on {', '.join(wrappers)}; set lora: null"
        )
    if expert_dropout:
        raise CaptureError(
            f"layer {layer.index}: the experts of {title} have no dropout on their activations; "
            "choose another method than st_moe, or remove expert_dropout"
        )


def run_self_ranking(
    experts: Any,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    projected: tuple[Tensor, ...],
    needs: frozenset[str],
) -> ExpertsResult:
    """Run ``experts`` on the input and on their own projections of it.

    Returns the results in ``needs``, like :func:`~moe_finetune.moe.experts.run_experts`.
    """
    out_TH, z_TKD, y_TKH = experts.run(hidden_TH, index_TK, weights_TK, *projected)
    return ExpertsResult(
        out_TH,
        gram(z_TKD) if "activations_gram" in needs else None,
        gram(y_TKH) if "outputs_gram" in needs else None,
        z_TKD if "activations" in needs else None,
        y_TKH if "outputs" in needs else None,
    )
