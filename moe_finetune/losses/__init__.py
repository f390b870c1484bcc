"""Loss terms by name; a new one takes one file and one line here."""

from moe_finetune.losses.base import TERMS
from moe_finetune.losses.coupling import Coupling
from moe_finetune.losses.dpp import Dpp
from moe_finetune.losses.erc import Erc
from moe_finetune.losses.inject import inject
from moe_finetune.losses.load_balance import LoadBalance
from moe_finetune.losses.ncl import Ncl
from moe_finetune.losses.orthogonality import Orthogonality
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.released import SoftmaxVariance, SpanOrthogonality
from moe_finetune.losses.router_orthogonality import RouterOrthogonality
from moe_finetune.losses.specialization import Specialization
from moe_finetune.losses.supervised_routing import SupervisedRouting
from moe_finetune.losses.variance import Variance
from moe_finetune.losses.z_loss import ZLoss

for term in (
    *(LoadBalance, ZLoss, Orthogonality, Variance, Specialization, Coupling, Erc),
    *(RouterOrthogonality, Dpp, Ncl, SupervisedRouting),
    *(SoftmaxVariance, SpanOrthogonality),
):
    TERMS.register(term.name, term)

__all__ = ["TERMS", "RoutingRecord", "inject"]
