import math

import pytest
import torch

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import teacher_routing_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record


def test_worked_by_hand():
    # The teacher spreads (3/4, 1/4), the student evenly: log 2 less the teacher's entropy.
    teacher = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    student = torch.zeros(1, 2, dtype=torch.float64)
    assert teacher_routing_loss(student, teacher).item() == pytest.approx(math.log(2) - entropy)
    assert teacher_routing_loss(teacher + 5.0, teacher).item() == pytest.approx(0.0, abs=1e-12)


def test_no_gradient_reaches_the_teacher():
    values = make()
    teacher = values["teacher_logits_TE"].requires_grad_()
    loss = teacher_routing_loss(values["logits_TE"].requires_grad_(), teacher)
    student_grad, teacher_grad = torch.autograd.grad(
        loss, (values["logits_TE"], teacher), allow_unused=True
    )
    assert teacher_grad is None and student_grad.abs().max() > 0.01


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_term_reads_the_teacher_of_its_layer(score):
    values, keep = make(), mask(17)
    kind = TERMS["teacher_routing"]
    term = kind(kind.Options(weight=1.0))
    context = LayerContext(teacher_logits_TE=values["teacher_logits_TE"])
    got = term.loss(record(values, score, keep), context)
    wanted = reference.teacher_routing(
        values["logits_TE"], values["teacher_logits_TE"], keep, score
    )
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ObjectiveError, match="no teacher routed these tokens; use it in stage"):
        term.loss(record(values, score, keep), LayerContext())
