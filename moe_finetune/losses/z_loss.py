"""Router z-loss: penalizes large router logits (ST-MoE, Zoph et al. 2022, eq. 5)."""

from torch import Tensor

from moe_finetune.losses.tensors import check_shapes, counted, full_precision, mean_over_tokens
from moe_finetune.losses.term import term


@term("z_loss", source="ST-MoE eq. 5", reads="router logits", trains="router")
@full_precision
def router_z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """``(logsumexp_e logits)²`` per token, in nats squared.

    Args:
        logits_TE: router logits before the score function.
        mask_T: True where a token counts; None counts all.

    Raises:
        ValueError: for wrong shapes.
    """
    check_shapes(logits_TE=logits_TE, mask_T=mask_T)
    logits_TE = counted(logits_TE, mask_T)
    return mean_over_tokens(logits_TE.logsumexp(-1).square(), mask_T)
