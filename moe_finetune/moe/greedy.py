"""The greedy subset of largest determinant (P4 theorem 6.3), per token.

A token's kernel is ``L_ij = q_i q_j cos(y_i, y_j)``: q the quality of an expert, y its output. One
expert after the other is taken, each time the one that raises ``f(S) = log det(I + L_S / eps)``
most: good experts that repeat what is chosen already gain little. f is 0 for no expert, monotone
and submodular, so that the greedy set has at least ``1 - 1/e`` of the best value of any k experts
(Nemhauser, Wolsey, Fisher 1978). With a large eps the choice is the k of highest quality.

That cosines are the similarity, and where eps stands (as in the paper's determinantal loss,
algorithm 2), are our reading.

Shape legend: T tokens, N candidates, k chosen, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy_choice(quality_TN: Tensor, features_TNH: Tensor, k: int, eps: float) -> Tensor:
    """``(T, k)`` candidates in the order in which they are taken; ties go to the first.

    The pivots of a Cholesky factor of ``L + eps I`` that grows by one row a choice (Chen et al.
    2018): what is left of a candidate's diagonal is what it adds to the determinant.

    Args:
        quality_TN: q, 0 or more.
        features_TNH: y, of any length; a zero vector has cosine 0 with anything.
        k: at most N.
        eps: above 0.
    """
    features_TNH = features_TNH.to(quality_TN.dtype)
    lengths_TN1 = features_TNH.norm(dim=-1, keepdim=True)
    scaled_TNH = features_TNH / lengths_TN1.masked_fill(lengths_TN1 == 0, 1) * quality_TN[..., None]
    left_TN = quality_TN.square()
    rows_TNk = quality_TN.new_zeros(*quality_TN.shape, k)
    chosen = []
    for step in range(k):
        pivot_T1 = left_TN.argmax(1, keepdim=True)
        chosen.append(pivot_T1)
        pivot_left_T1 = left_TN.gather(1, pivot_T1).clamp_min(0) + eps
        at_T1H = pivot_T1[..., None].expand(-1, 1, scaled_TNH.shape[-1])
        kernel_TN = (scaled_TNH @ scaled_TNH.gather(1, at_T1H).mT).squeeze(-1)
        before_T1k = rows_TNk.gather(1, pivot_T1[..., None].expand(-1, 1, k))
        row_TN = (kernel_TN - (rows_TNk @ before_T1k.mT).squeeze(-1)) / pivot_left_T1.sqrt()
        rows_TNk[..., step] = row_TN
        left_TN = (left_TN - row_TN.square()).scatter(1, pivot_T1, float("-inf"))
    return torch.cat(chosen, 1)
