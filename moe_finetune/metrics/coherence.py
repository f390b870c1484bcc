"""Coherence of expert features: when can top-k selection recover the right experts?"""

import numpy as np

from moe_finetune.metrics.arrays import Array, floats, unit_rows


def mutual_coherence(features_NH: Array) -> float:
    """``mu = max_{i != j} abs cos(E_i, E_j)`` over N expert features ``(N, H)``.

    Over a token's K selected experts it is a lower bound of the value over all E. Range 0
    (orthogonal: perfect specialization) to 1 (two experts parallel). A zero feature has cosine 0
    with anything; N = 1 has no pairs and gives 0. Source: P4 def. 5.2.
    """
    unit = unit_rows(floats("features_NH", features_NH, ("N", "H")))
    return float(gram_coherence((unit @ unit.T)[None])[0])


def gram_coherence(gram_TKK: Array) -> np.ndarray:
    """:func:`mutual_coherence` of each token's outputs, from their Gram matrices: ``(T,)``."""
    gram = floats("gram_TKK", gram_TKK, ("T", "K", "K"))
    width = gram.shape[1]
    if gram.shape[2] != width:
        raise ValueError(f"gram_TKK: got shape {gram.shape}, expected (T, {width}, {width})")
    norms_TK = np.sqrt(np.maximum(np.einsum("tkk->tk", gram), 0))
    scale = norms_TK[:, :, None] * norms_TK[:, None, :]
    cosines = np.divide(np.abs(gram), scale, out=np.zeros_like(gram), where=scale > 0)
    cosines[:, np.arange(width), np.arange(width)] = 0
    return np.minimum(cosines.max((1, 2)), 1.0)


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
