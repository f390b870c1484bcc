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


def test_bad_options():
    for options in ({"form": "angle"}, {"tau_gate": 1.0}, {"tau_gate": -0.1}, {"eps": 0.0}):
        with pytest.raises(ValidationError, match=next(iter(options))):
            TERM.Options(weight=1.0, **options)
    with pytest.raises(ValueError, match="form is 'angle', expected one of projection, cosine"):
        orthogonality_loss(make()["outputs_TKH"], form="angle")
