import pytest
import torch

from moe_finetune.losses.functional import specialization_loss
from tests.losses.cases import make


def test_worked_by_hand():
    # cos² of (1,0)-(1,1) is 1/2, of (1,0)-(0,2) 0, of (1,1)-(0,2) 1/2; each pair counts twice.
    activations = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]], dtype=torch.float64)
    assert specialization_loss(activations).item() == pytest.approx(2.0)


@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e8])
def test_float32_holds_over_many_scales(scale):
    activations = make()["activations_TKD"]
    small = (activations.float() * scale).requires_grad_()
    loss = specialization_loss(small)
    assert loss.item() == pytest.approx(specialization_loss(activations).item(), rel=1e-4)
    assert torch.autograd.grad(loss, small)[0].isfinite().all()
