import math

import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import router_z_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record


def test_worked_by_hand():
    # logsumexp of (0, 0) is log 2; of (log 3, 0) it is log 4.
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    expected = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    assert router_z_loss(logits).item() == pytest.approx(expected)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[200.0, -300.0, 100.0]], requires_grad=True)
    loss = router_z_loss(logits)
    assert loss.item() == pytest.approx(40000.0)
    assert torch.autograd.grad(loss, logits)[0][0].tolist() == pytest.approx([400.0, 0.0, 0.0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_term_reads_logits_before_the_score(score):
    values, keep = make(), mask(17)
    kind = TERMS["z_loss"]
    got = kind(kind.Options(weight=1.0)).loss(record(values, score, keep), LayerContext())
    torch.testing.assert_close(got, reference.z_loss(values["logits_TE"], keep))
