"""How different the experts are on tokens: neighbors and clusters."""

import numpy as np

from moe_finetune.metrics.arrays import (
    Array,
    check_shape,
    chunks,
    floats,
    integers,
    to_numpy,
)

NEIGHBORS = 10
"""Neighbors of an embedding among which :func:`expert_overlap` looks for other experts."""


def expert_overlap(embeddings_NH: Array, labels_N: Array, k: int = NEIGHBORS) -> float:
    """Mean share of an embedding's k nearest neighbors with a different expert label.

    Euclidean distance, without the embedding itself, ``k' = min(k, N - 1)``, ties to the lower
    index. ``embeddings_NH`` ``(N, H)`` (a token's input to the MoE block, or its top-1 expert's
    output), ``labels_N`` ``(N,)`` its top-1 expert; the cost grows with N squared. 0 at
    perfect specialization; about ``1 - sum_e share_e^2`` if labels are independent of the
    embeddings. Raises ValueError for NaN. Source: P0 eq. 39-41 (distance and k are ours).
    """
    embeddings, labels = _checked(embeddings_NH, labels_N)
    count = len(labels)
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    if count < 2:
        raise ValueError(f"embeddings_NH: got {count} embedding, expected at least 2 to compare")
    neighbors = min(k, count - 1)
    other = 0
    for part in chunks(count, count):
        other += _foreign(_squared_distances(embeddings, part), labels, part.start, neighbors)
    return other / (count * neighbors)


def separation(embeddings_NH: Array, labels_N: Array) -> tuple[float | None, float | None]:
    """:func:`expert_overlap` and scikit-learn's silhouette of a sample, from one distance matrix.

    The silhouette (P0 eq. 38) is -1 (every point is nearer to another expert's) to 1 (perfectly
    separate experts). None if undefined: fewer than 2 embeddings, or 1 or N different labels.
    """
    embeddings, labels = _checked(embeddings_NH, labels_N)
    count, kinds = len(labels), len(np.unique(labels))
    if count < 2:
        return None, None
    distances = _squared_distances(embeddings, slice(0, count))
    neighbors = min(NEIGHBORS, count - 1)
    overlap = _foreign(distances.copy(), labels, 0, neighbors) / (count * neighbors)
    return overlap, _silhouette(distances, labels) if 2 <= kinds <= count - 1 else None


def _foreign(distances_RN: np.ndarray, labels_N: np.ndarray, start: int, neighbors: int) -> int:
    """Number of nearest neighbors with a different label, for embeddings from ``start`` on."""
    rows = np.arange(len(distances_RN))
    distances_RN[rows, rows + start] = np.inf
    nearest = _smallest(distances_RN, neighbors)
    return int((nearest & (labels_N != labels_N[rows + start, None])).sum())


def _silhouette(squared_NN: np.ndarray, labels_N: np.ndarray) -> float:
    from sklearn.metrics import silhouette_score

    distances = np.sqrt(squared_NN)
    np.fill_diagonal(distances, 0)
    return float(silhouette_score(distances, labels_N, metric="precomputed"))


def _squared_distances(embeddings_NH: np.ndarray, part: slice) -> np.ndarray:
    """Squared Euclidean distances from the embeddings in ``part`` to all, in their dtype."""
    squares_N = np.einsum("nh,nh->n", embeddings_NH, embeddings_NH)
    products = embeddings_NH[part] @ embeddings_NH.T
    return np.maximum(squares_N[part, None] + squares_N - 2 * products, 0)


def _smallest(values_RN: np.ndarray, count: int) -> np.ndarray:
    """Bool mask of the ``count`` smallest values in each row; ties go to the lower index."""
    last = np.partition(values_RN, count - 1, axis=-1)[:, count - 1 : count]
    smaller, equal = values_RN < last, values_RN == last
    room = count - smaller.sum(-1, keepdims=True)
    return smaller | (equal & (np.cumsum(equal, axis=-1) <= room))


def _checked(embeddings_NH: Array, labels_N: Array) -> tuple[np.ndarray, np.ndarray]:
    embeddings = to_numpy(embeddings_NH)
    check_shape("embeddings_NH", embeddings, ("N", "H"))
    labels = integers("labels_N", labels_N, (len(embeddings),))
    embeddings = floats("embeddings_NH", embeddings, ("N", "H"), as_given=True)
    if embeddings.dtype in (np.float16, np.float32):
        # A shift does not change distances, and float32 is more precise without it.
        return (embeddings - embeddings.mean(0, dtype=np.float64)).astype(np.float32), labels
    return embeddings.astype(np.float64, copy=False), labels
