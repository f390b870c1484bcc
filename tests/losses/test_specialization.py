import pytest
import torch

from moe_finetune.losses.functional import specialization_loss
from moe_finetune.losses.gram import cosines, gram
from tests.losses.cases import make


def test_worked_by_hand():
    # cos² of (1,0)-(1,1) is 1/2, of (1,0)-(0,2) 0, of (1,1)-(0,2) 1/2; each pair counts twice.
    activations = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]], dtype=torch.float64)
    assert specialization_loss(activations).item() == pytest.approx(2.0)


def test_length_means_nothing():
    activations = make()["activations_TKD"]
    scale = torch.rand(*activations.shape[:2], 1, dtype=torch.float64) + 0.1
    torch.testing.assert_close(
        specialization_loss(activations * scale), specialization_loss(activations)
    )


def test_zero_activations_have_no_cosine_and_a_zero_gradient():
    activations = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]]], requires_grad=True)
    loss = specialization_loss(activations)
    torch.testing.assert_close(loss, specialization_loss(activations[:, 1:]))
    grad = torch.autograd.grad(loss, activations)[0]
    assert grad.isfinite().all() and (grad[0, 0] == 0).all() and grad[0, 1].norm() > 0


@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e8])
def test_float32_holds_over_many_scales(scale):
    activations = make()["activations_TKD"]
    small = (activations.float() * scale).requires_grad_()
    loss = specialization_loss(small)
    assert loss.item() == pytest.approx(specialization_loss(activations).item(), rel=1e-4)
    assert torch.autograd.grad(loss, small)[0].isfinite().all()


def test_cosines_are_torchs():
    activations = make()["activations_TKD"]
    expected = torch.cosine_similarity(activations.unsqueeze(1), activations.unsqueeze(2), dim=-1)
    expected.diagonal(dim1=1, dim2=2).zero_()
    torch.testing.assert_close(cosines(gram(activations)), expected)
