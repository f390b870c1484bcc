"""Orthogonality of the router's rows (P2 §4.5, after ERNIE)."""

from torch import Tensor

from moe_finetune.losses.base import LayerContext, Term, TermOptions
from moe_finetune.losses.gram import cosines, gram
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import check_shapes, full_precision


@full_precision
def router_orthogonality_loss(router_weight_EH: Tensor) -> Tensor:
    """``1/(E(E-1)) Σ_{i≠j} cos²(R_i, R_j)``: mean squared cosine of the router's rows, in [0, 1].

    The normalization is ours. A zero row has cosine 0 with anything; a single expert gives 0.

    Raises:
        ValueError: for a wrong shape.

    Source: P2 (arXiv 2512.23447) §4.5.
    """
    check_shapes(router_weight_EH=router_weight_EH)
    experts = router_weight_EH.shape[0]
    cosines_EE = cosines(gram(router_weight_EH.unsqueeze(0)))
    return cosines_EE.square().sum() / max(experts * (experts - 1), 1)


class RouterOrthogonality(Term):
    """``router_orthogonality``: similarity of the router's rows."""

    name = "router_orthogonality"
    source = "P2 §4.5"
    reads = "router weight"
    trains = frozenset({"router"})
    below = False
    Options = TermOptions

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        assert record.router_weight_EH is not None
        return router_orthogonality_loss(record.router_weight_EH)
