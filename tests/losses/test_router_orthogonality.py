import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import router_orthogonality_loss
from tests.losses import reference
from tests.losses.cases import make, record

TERM = TERMS["router_orthogonality"]


def test_worked_by_hand():
    # cos² 1/2, 0 and 1/2 over three pairs: mean 1/3.
    router = torch.tensor([[1.0, 0.0], [3.0, 3.0], [0.0, 2.0]], dtype=torch.float64)
    assert router_orthogonality_loss(router).item() == pytest.approx(1 / 3)
    assert router_orthogonality_loss(router[:1]).item() == 0


def test_term_reads_the_router():
    values = make()
    got = TERM(TERM.Options(weight=1.0)).loss(record(values), LayerContext())
    torch.testing.assert_close(got, reference.router_orthogonality(values["router_weight_EH"]))
