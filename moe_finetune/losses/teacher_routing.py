"""Routing distillation: the student's routers learn the distributions of a teacher's."""

from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, Term
from moe_finetune.losses.record import RoutingRecord, log_scores
from moe_finetune.losses.tensors import (
    check_shapes,
    counted,
    full_precision,
    mean_over_tokens,
)


@full_precision
def teacher_routing_loss(
    logits_TE: Tensor,
    teacher_logits_TE: Tensor,
    mask_T: Tensor | None = None,
    *,
    score: str = "softmax",
) -> Tensor:
    """``KL(teacher || student)`` of the routers' distributions over all experts, in nats per token.

    Args:
        logits_TE: the student's router logits, before the score function.
        teacher_logits_TE: the teacher's router logits over the same experts; carries no gradient.
        mask_T: True where a token counts; None counts all.
        score: score function of both routers; scores such as a sigmoid's are normalized over
            experts.

    Raises:
        ValueError: for wrong shapes.
    """
    check_shapes(logits_TE=logits_TE, teacher_logits_TE=teacher_logits_TE, mask_T=mask_T)
    student_TE, teacher_TE = (
        log_scores(counted(logits, mask_T), score).log_softmax(-1)
        for logits in (logits_TE, teacher_logits_TE.detach())
    )
    divergence_T = (teacher_TE.exp() * (teacher_TE - student_TE)).sum(-1)
    return mean_over_tokens(divergence_T, mask_T)


class TeacherRouting(Term):
    """``teacher_routing``: divergence of the routers from a teacher's, in stage ``distill``."""

    name = "teacher_routing"
    source = "Hinton et al. 2015, for a router's distribution; ours"
    reads = "router logits, and those of a teacher"
    trains = frozenset({"router"})
    selection = True

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        if context.teacher_logits_TE is None:
            raise ObjectiveError(
                "method.terms.teacher_routing: no teacher routed these tokens; use it in stage "
                "distill, with a teacher of the student's family"
            )
        return teacher_routing_loss(
            record.logits_TE, context.teacher_logits_TE, record.mask_T, score=record.score
        )
