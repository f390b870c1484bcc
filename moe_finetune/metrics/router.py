"""Metrics of the weights of router and gate projections, without tokens."""

from collections.abc import Sequence

import numpy as np

from moe_finetune.metrics.arrays import Array, floats, unit_rows


def router_cosine(router_weight_EH: Array) -> float:
    """Mean over i != j of ``abs cos(R_i, R_j)`` of one layer's router rows.

    ``router_weight_EH`` ``(E, H)``. Range 0 (orthogonal) to 1 (parallel); the paper's baseline is
    0.15. Source: P2 section 4.5.
    """
    router = _rows(router_weight_EH)
    unit = unit_rows(router)
    cosines = np.abs(unit @ unit.T)
    experts = len(router)
    return float((cosines.sum() - np.trace(cosines)) / (experts * (experts - 1)))


def noise_level(router_weight_EH: Array) -> float:
    """Mean over experts of ``eps_i = min_{j != i} |R_i - R_j| / (2 |R_i|)``.

    The width of ERC's noise: it grows as the router's rows move apart. 0 if each row has a
    duplicate, ``sqrt(2) / 2`` for orthogonal rows of equal length. Source: P2 Fig. 5a.
    """
    router = _rows(router_weight_EH)
    norms = np.linalg.norm(router, axis=-1)
    if not norms.all():
        raise ValueError(f"router_weight_EH: row {int(norms.argmin())} is zero, expected none")
    nearest = np.empty(len(router))
    for expert, row in enumerate(router):
        distances = np.linalg.norm(router - row, axis=-1)
        distances[expert] = np.inf
        nearest[expert] = distances.min()
    return float((nearest / (2 * norms)).mean())


def erc_table(
    router_weight_EH: Array,
    gate_weight_EDH: Array,
    alphas: Sequence[float] = (1, 2, 3, 4, 5),
) -> dict:
    """ERC loss of one layer without noise for several alphas, and the least alpha that gives 0.

    ``1/E^2 sum_{i != j} [max(M_ij - alpha M_ii, 0) + max(M_ji - alpha M_ii, 0)]`` with
    ``M[i, j] = |W_g^j R_i|``; the gate is the effective one, LoRA included. Returns ``loss``
    ``{alpha: value >= 0}`` and ``least_alpha`` = ``max_{i != j} max(M_ij, M_ji) / M_ii`` (infinite
    when some ``M_ii`` is 0); at most 1 when router and experts agree perfectly. Source: P2 Table 2.
    """
    router = _rows(router_weight_EH)
    gate = floats("gate_weight_EDH", gate_weight_EDH, (len(router), "D", router.shape[1]))
    norms = [np.linalg.norm(router @ weight_DH.T, axis=-1) for weight_DH in gate]
    return erc_of_norms(np.stack(norms, axis=1), alphas)


def erc_of_norms(norms_EE: np.ndarray, alphas: Sequence[float] = (1, 2, 3, 4, 5)) -> dict:
    """:func:`erc_table` from ``M (E, E)``, for gates that do not fit into memory together."""
    norms = norms_EE
    own_norm = np.diag(norms)[:, None]
    off = ~np.eye(len(norms), dtype=bool)
    losses = {
        float(alpha): float(
            (
                np.maximum(norms - alpha * own_norm, 0)[off].sum()
                + np.maximum(norms.T - alpha * own_norm, 0)[off].sum()
            )
            / norms.size
        )
        for alpha in alphas
    }
    rivals = np.where(off, np.maximum(norms, norms.T), 0).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(rivals > 0, rivals / own_norm[:, 0], 0.0)
    return {"loss": losses, "least_alpha": float(ratios.max())}


def _rows(router_weight_EH: Array) -> np.ndarray:
    router = floats("router_weight_EH", router_weight_EH, ("E", "H"))
    if len(router) < 2:
        raise ValueError(f"router_weight_EH: got shape {router.shape}, expected (E >= 2, H)")
    return router
