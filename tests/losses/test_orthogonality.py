import pytest
import torch
from pydantic import ValidationError

from moe_finetune.losses import TERMS
from moe_finetune.losses.functional import orthogonality_loss
from tests.losses.cases import make

TERM = TERMS["orthogonality"]


def test_worked_by_hand():
    # y_0 = (3, 0), y_1 = (4, 4): proj of y_0 on y_1 has squared length 144/32, back 144/9.
    outputs = torch.tensor([[[3.0, 0.0], [4.0, 4.0]]], dtype=torch.float64)
    assert orthogonality_loss(outputs).item() == pytest.approx(4.5 + 16)
    assert orthogonality_loss(outputs, form="cosine").item() == pytest.approx(1.0)
    assert orthogonality_loss(outputs, eps=1.0).item() == pytest.approx(
        144 * 32 / 33**2 + 144 * 9 / 10**2
    )


def test_orthogonal_outputs_give_zero_and_equal_ones_the_number_of_pairs():
    assert orthogonality_loss(torch.eye(3).unsqueeze(0)).item() == 0
    same = torch.ones(2, 4, 5)
    assert orthogonality_loss(same, form="cosine").item() == pytest.approx(12)
    assert orthogonality_loss(same).item() == pytest.approx(12 * 5)


@pytest.mark.parametrize("form", ["projection", "cosine"])
@pytest.mark.parametrize("one_sided", [False, True])
def test_zero_vectors_have_no_overlap_and_a_zero_gradient(form, one_sided):
    outputs = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]]], requires_grad=True)
    loss = orthogonality_loss(outputs, form=form, one_sided=one_sided)
    without = orthogonality_loss(outputs[:, 1:], form=form, one_sided=one_sided)
    torch.testing.assert_close(loss, without)
    grad = torch.autograd.grad(loss, outputs)[0]
    assert grad.isfinite().all() and grad[0, 1].norm() > 0
    assert (grad[0, 0] == 0).all()


def test_threshold_is_strict_and_needs_both_scores():
    values = make(dtype=torch.float32)
    outputs = values["outputs_TKH"][:1]
    for scores, left in [
        ((0.2, 0.3, 0.5), [1, 2]),
        ((0.2, 0.2, 0.6), []),
        ((0.5, 0.1, 0.4), [0, 2]),
    ]:
        value = orthogonality_loss(outputs, torch.tensor([scores]), tau_gate=0.2)
        torch.testing.assert_close(value, orthogonality_loss(outputs[:, left]))


def test_large_outputs_stay_finite_in_float32():
    outputs = torch.tensor([[[1e7, 0.0], [1e7, 1e7]]], requires_grad=True)
    loss = orthogonality_loss(outputs)
    assert loss.item() == pytest.approx(1.5e14)
    assert torch.autograd.grad(loss, outputs)[0].isfinite().all()


def test_the_gradient_of_one_side_is_less():
    outputs = make()["outputs_TKH"].requires_grad_()
    both = torch.autograd.grad(orthogonality_loss(outputs), outputs)[0]
    one = torch.autograd.grad(orthogonality_loss(outputs, one_sided=True), outputs)[0]
    assert not torch.allclose(both, one, rtol=0.05)


def test_bad_options():
    for options in ({"form": "angle"}, {"tau_gate": 1.0}, {"tau_gate": -0.1}, {"eps": 0.0}):
        with pytest.raises(ValidationError, match=next(iter(options))):
            TERM.Options(weight=1.0, **options)
    with pytest.raises(ValueError, match="form is 'angle', expected one of projection, cosine"):
        orthogonality_loss(make()["outputs_TKH"], form="angle")
