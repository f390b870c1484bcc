"""Two-dimensional projections for pictures: PCA of tokens, t-SNE of gate rows."""

from typing import Any

import numpy as np

BUSIEST = 3
MOST_POINTS = 450
EVERY = 8  # P2 Fig. 4 shows experts i with i mod 8 = 0
ROWS_AN_EXPERT = 40


def principal_points(
    layer: int, inputs_NH: np.ndarray, top_N: np.ndarray, load_E: np.ndarray
) -> dict[str, Any]:
    """First two principal components of tokens whose top expert is one of the three busiest.

    ``inputs_NH`` ``(N, H)`` embeddings, ``top_N`` their top experts, ``load_E`` dispatches. Returns
    ``layer`` and ``points`` ``[x, y, expert]`` of at most 450 tokens (a seeded draw), none below 3
    tokens. Source: P0 Fig. 5.
    """
    busiest = np.argsort(-load_E, kind="stable")[:BUSIEST]
    chosen = np.flatnonzero(np.isin(top_N, busiest))
    if len(chosen) < 3:
        return {"layer": layer, "points": []}
    if len(chosen) > MOST_POINTS:  # of all rows and domains, not of the first ones
        chosen = np.sort(np.random.default_rng(0).permutation(chosen)[:MOST_POINTS])
    rows = inputs_NH[chosen].astype(np.float32)
    centered = rows - rows.mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    return {"layer": layer, "points": _points(centered @ axes[:2].T, top_N[chosen])}


def gate_experts(num_experts: int) -> list[int]:
    """The experts whose gate rows are drawn: every eighth one."""
    return list(range(0, num_experts, EVERY))


def gate_row_points(layer: int, rows_EDH: np.ndarray, experts_E: list[int]) -> dict[str, Any]:
    """t-SNE of the rows of some experts' gate projections.

    ``rows_EDH`` ``(E, D, H)`` rows of the experts numbered ``experts_E``; at most 40 per expert,
    evenly spaced, are drawn. Returns ``layer`` and ``points`` ``[x, y, expert]``. Source: P2 Fig.
    4. Perplexity is 30, or a third of the rows if that is less; it starts from the principal
    components, so it is deterministic.
    """
    from sklearn.manifold import TSNE

    step = -(-rows_EDH.shape[1] // ROWS_AN_EXPERT)
    chosen = rows_EDH[:, ::step].astype(np.float32)
    rows = chosen.reshape(-1, rows_EDH.shape[2])
    labels = np.repeat(experts_E, chosen.shape[1])
    if len(rows) < 4:
        return {"layer": layer, "points": []}
    perplexity = min(30.0, len(rows) / 3)
    flat = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(rows)
    return {"layer": layer, "points": _points(flat, labels)}


def _points(flat_N2: np.ndarray, experts_N: np.ndarray) -> list[list[float | int]]:
    return [
        [round(float(x), 4), round(float(y), 4), int(expert)]
        for (x, y), expert in zip(flat_N2, experts_N, strict=True)
    ]


def spread_between(points_N2: np.ndarray, groups_N: np.ndarray) -> float:
    """Share of the points' variance that is between groups (eta squared); NaN without points.

    Sum of squared distances from the common mean, of the group means divided by that of the points:
    0 if the group means coincide, 1 if each group is a single distinct point.
    """
    if not len(points_N2):
        return float("nan")
    center = points_N2.mean(0)
    total = float(((points_N2 - center) ** 2).sum())
    between = 0.0
    for group in np.unique(groups_N):
        mine = points_N2[groups_N == group]
        between += len(mine) * float(((mine.mean(0) - center) ** 2).sum())
    return between / total if total else float("nan")
