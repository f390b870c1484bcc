"""Coherence of expert features: when can top-k selection recover the right experts?"""

import numpy as np

from moe_finetune.metrics.arrays import Array, floats, unit_rows


def mutual_coherence(features_NH: Array) -> float:
    """``mu = max_{i != j} abs cos(E_i, E_j)`` over N expert features ``(N, H)``.

    Over a token's K selected experts it is a lower bound of the value over all E. Range 0
    (orthogonal: perfect specialization) to 1 (two experts parallel). A zero feature has cosine 0
    with anything; N = 1 has no pairs and gives 0. Source: P4 def. 5.2.
    """
    import torch

    from moe_finetune.losses.gram import cosines

    unit = torch.from_numpy(unit_rows(floats("features_NH", features_NH, ("N", "H"))))
    return min(float(cosines((unit @ unit.T)[None]).abs().max()), 1.0)


def coherence_barrier(k: int) -> float:
    """``1 / (2k - 1)``: below it, greedy selection recovers k experts of equal weight.

    Sufficient, not necessary. 1 for k = 1, 1/3 for k = 2, 1/11 for k = 6. Source: P4 thm 5.3.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    return 1 / (2 * k - 1)


def effective_rank(features_NH: Array) -> float:
    """``exp`` of the entropy of the normalized singular values of the matrix as given.

    ``features_NH`` ``(N, H)``: one row per expert, its outputs on a token sample, flattened. Range
    1 (all experts equal up to scale) to ``min(N, H)`` (orthogonal, equal norms); 0 for a zero
    matrix. Source: P4 Fig. 3b (the definition, after Roy and Vetterli 2007, is ours).
    """
    values = np.linalg.svd(floats("features_NH", features_NH, ("N", "H")), compute_uv=False)
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))
