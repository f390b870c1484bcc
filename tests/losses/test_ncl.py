from __future__ import annotations

import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import ncl_from_gram, ncl_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record

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


@pytest.mark.parametrize("normalize", [True, False])
def test_gram_path_equals_the_vectors_in_value_and_gradient(normalize):
    values, keep = make(), mask(17)
    outputs = values["outputs_TKH"].requires_grad_()
    direct = ncl_loss(outputs, keep, normalize)
    through = ncl_from_gram(outputs @ outputs.mT, keep, normalize)
    torch.testing.assert_close(through, direct)
    torch.testing.assert_close(
        torch.autograd.grad(through, outputs), torch.autograd.grad(direct, outputs)
    )


def test_term_reads_the_gram_of_outputs():
    values, keep = make(), mask(17)
    term = TERM(TERM.Options(weight=1.0))
    assert term.needs == {"outputs_gram"}
    got = term.loss(record(values, mask_T=keep), LayerContext())
    torch.testing.assert_close(got, reference.ncl(values["outputs_TKH"], keep, True))


def test_the_raw_form_warns():
    with pytest.warns(UserWarning, match="unbounded below"):
        term = TERM(TERM.Options(weight=1.0, normalize=False))
    values = make()
    got = term.loss(record(values), LayerContext())
    torch.testing.assert_close(got, reference.ncl(values["outputs_TKH"], None, False))
