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


def test_the_raw_form_warns():
    with pytest.warns(UserWarning, match="unbounded below"):
        term = TERM(TERM.Options(weight=1.0, normalize=False))
    values = make()
    got = term.loss(record(values), LayerContext())
    torch.testing.assert_close(got, reference.ncl(values["outputs_TKH"], None, False))
