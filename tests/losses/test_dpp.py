import math

import pytest
import torch
from pydantic import ValidationError

from moe_finetune.losses import TERMS
from moe_finetune.losses.functional import dpp_loss
from tests.losses.cases import make

TERM = TERMS["dpp"]


def test_worked_by_hand():
    # Unit vectors with cosine 3/5: det = (1 + eps)² - 9/25.
    outputs = torch.tensor([[[2.0, 0.0], [0.3, 0.4]]], dtype=torch.float64)
    assert dpp_loss(outputs, eps=0.2).item() == pytest.approx(-math.log(1.44 - 0.36))
    assert dpp_loss(outputs).item() == pytest.approx(-math.log(1.0001**2 - 0.36))


def test_equal_outputs_stay_finite_in_float32():
    # Ĝ of K equal vectors has one eigenvalue K and K-1 zeros.
    outputs = torch.randn(1, 1, 9).expand(5, 4, 9).clone().requires_grad_()
    loss = dpp_loss(outputs)
    assert loss.item() == pytest.approx(-math.log(4.0001) - 3 * math.log(1e-4), rel=1e-3)
    assert torch.autograd.grad(loss, outputs)[0].isfinite().all()


def test_eight_outputs_equal_torchs_determinant():
    outputs = torch.randn(3, 8, 11, dtype=torch.float64)
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    kernel = unit @ unit.mT + 1e-4 * torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(dpp_loss(outputs), -kernel.logdet().mean())


def test_bad_eps():
    with pytest.raises(ValueError, match=r"eps is 0\.0, expected a positive number"):
        dpp_loss(make()["outputs_TKH"], eps=0.0)
    with pytest.raises(ValidationError, match="eps"):
        TERM.Options(weight=1.0, eps=9e-6)
    parallel = torch.randn(3, 1, 7) * torch.rand(3, 4, 1)
    with pytest.raises(ValueError, match=r"eps is 1e-06, expected at least 1e-05"):
        dpp_loss(parallel, eps=1e-6)
    loss = dpp_loss(parallel.double(), eps=1e-6).item()
    # One direction: eigenvalues 4 + eps and three times eps.
    assert loss == pytest.approx(-math.log(4.0) - 3 * math.log(1e-6), rel=1e-4)


def test_parallel_outputs_of_a_large_model_at_the_smallest_eps():
    torch.manual_seed(0)
    outputs = torch.randn(257, 1, 7168) * torch.rand(257, 6, 1).mul(5).exp()
    loss = dpp_loss(outputs, eps=1e-5).item()
    # An entry that is off by 1e-6 moves an eigenvalue of 1e-5 by a tenth.
    assert loss == pytest.approx(-math.log(6.0) - 5 * math.log(1e-5), abs=2.0)
