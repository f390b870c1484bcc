import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import ncl_loss
from tests.losses import reference
from tests.losses.cases import make, record

TERM = TERMS["ncl"]


def test_worked_by_hand():
    # y = (3, 0), (0, 5): mean (1.5, 2.5), each d has squared length 8.5; mean norm 4.
    outputs = torch.tensor([[[3.0, 0.0], [0.0, 5.0]]], dtype=torch.float64)
    assert ncl_loss(outputs, normalize=False).item() == pytest.approx(-17.0)
    assert ncl_loss(outputs).item() == pytest.approx(-17.0 / 16)


def test_equal_outputs_give_zero():
    outputs = torch.randn(2, 1, 5, dtype=torch.float64).expand(2, 3, 5)
    assert abs(ncl_loss(outputs).item()) < 1e-12


def test_normalised_form_ignores_scale_and_is_bounded_and_the_raw_form_is_not():
    outputs = make()["outputs_TKH"]
    torch.testing.assert_close(ncl_loss(1e3 * outputs), ncl_loss(outputs))
    torch.testing.assert_close(
        ncl_loss(1e3 * outputs, normalize=False), 1e6 * ncl_loss(outputs, normalize=False)
    )
    lone = torch.zeros(1, 3, 4)
    lone[0, 1] = 7.0
    assert -9 <= ncl_loss(lone).item() == pytest.approx(-6.0)


def test_zero_outputs():
    outputs = torch.zeros(2, 3, 4)
    outputs[0, 1:] = torch.randn(2, 4)
    outputs.requires_grad_()
    loss = ncl_loss(outputs)
    torch.testing.assert_close(loss, ncl_loss(outputs[:1]) / 2)
    grad = torch.autograd.grad(loss, outputs)[0]
    assert grad.isfinite().all() and (grad[1] == 0).all() and grad[0, 1].norm() > 0


def test_the_raw_form_warns():
    with pytest.warns(UserWarning, match="unbounded below"):
        term = TERM(TERM.Options(weight=1.0, normalize=False))
    values = make()
    got = term.loss(record(values), LayerContext())
    torch.testing.assert_close(got, reference.ncl(values["outputs_TKH"], None, False))
