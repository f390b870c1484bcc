"""A checkpointed layer that runs again in the backward takes the experts of its first visit.

Its recomputation is not always equal in every bit (another kernel, another order of a sum), and
where two experts' scores are nearly tied the router may then select the other one: the gradient
would be that of another forward than the one whose loss was computed. Router replay does the same
between a rollout and training. Weights are the recomputed router's for the kept experts.
"""

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.losses.tensors import packed_index
from moe_finetune.moe.choice.select_again import Weighting, same_experts
from moe_finetune.moe.layers import MoeLayer


def keep_choice(
    layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep a first visit's selection; replace a recomputation's by it.

    Both visits run the same operations: checkpointing compares the tensors that they save, and
    selective checkpointing asks in the second for what the first computed.
    """
    context = layer.context
    if context is None:
        return weights_TK, index_TK
    first_visit = layer.index not in context.choices
    if first_visit:
        packed = packed_index(index_TK, logits_TE.shape[1]) if context.checkpoints else None
        context.choices[layer.index] = packed
    elif not in_backward():
        raise CaptureError(
            f"layer {layer.index} of {type(layer.decoder_layer).__name__} runs more than once in a "
            "forward; such a model is not supported, because losses and records would count one "
            "of its passes only"
        )
    if not context.checkpoints:
        return weights_TK, index_TK
    packed = context.choices[layer.index]
    assert packed is not None
    kept_TK = packed.long()
    changed = (~same_experts(kept_TK, index_TK)).sum(dtype=torch.float64)
    if not first_visit:
        context.plan.note_repeated(changed, len(index_TK))
    if layer.family.own_weights or not context.plan.keeps_choice:
        return weights_TK, index_TK
    same_T1 = (kept_TK == index_TK).all(-1, keepdim=True)
    weighting = Weighting(layer)
    again_TK = weighting.weights(weighting.scores(logits_TE), kept_TK).to(weights_TK.dtype)
    return torch.where(same_T1, weights_TK, again_TK), kept_TK


def in_backward() -> bool:
    """Whether a backward pass runs this code."""
    return torch._C._current_graph_task_id() != -1
