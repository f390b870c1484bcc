"""Orthogonality of the router's rows (P2 §4.5, after ERNIE)."""

from torch import Tensor

from moe_finetune.losses.gram import cosines, gram
from moe_finetune.losses.tensors import check_shapes, full_precision
from moe_finetune.losses.term import term


@term("router_orthogonality", source="P2 §4.5", reads="router weight", trains="router", below=False)
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
