"""Loss terms by name; a new one takes one file and one line here."""

from moe_finetune.losses import (  # noqa: F401  (each registers its loss)
    dpp,
    ncl,
    orthogonality,
    router_orthogonality,
    specialization,
    variance,
    z_loss,
)
from moe_finetune.losses.base import TERMS
from moe_finetune.losses.coupling import Coupling
from moe_finetune.losses.erc import Erc
from moe_finetune.losses.inject import inject
from moe_finetune.losses.load_balance import LoadBalance
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.supervised_routing import SupervisedRouting

for kind in (LoadBalance, Coupling, Erc, SupervisedRouting):
    TERMS.register(kind.name, kind)

__all__ = ["TERMS", "RoutingRecord", "inject"]
