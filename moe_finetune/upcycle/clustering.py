"""Group categories into N clusters: TF-IDF, spectral embedding, k-means with bounds on sizes.

Shape legend: C categories, V vocabulary, N clusters, P places, D dimensions of the embedding. Sizes
are numbers of categories. Source: P3 §3.1; k-means with size constraints alternates an optimal
assignment to places (scipy) with means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_finetune.errors import RecipeError

ITERATIONS = 100
FAR = 1e9


@dataclass(frozen=True)
class Sizes:
    """Fewest and most categories of each cluster, ``(N,)`` int each."""

    least_N: np.ndarray
    most_N: np.ndarray


def sizes_of(
    categories: int,
    clusters: int,
    pinned: Mapping[int, int],
    *,
    bounds: tuple[int, int] | None = None,
    exclusive: bool = False,
) -> Sizes:
    """Bounds of the clusters' sizes around the pins (category -> cluster).

    If every category is pinned, the pins determine the sizes; without ``bounds`` they differ by one
    at most. With ``exclusive`` clusters with pinned categories get no others.
    """
    if categories < clusters:
        raise RecipeError(
            f"texts.categories: {categories} categories are fewer than the {clusters} clusters; "
            "give more categories or lower clusters.count"
        )
    pins_N = np.bincount(list(pinned.values()), minlength=clusters)
    fixed_N = (pins_N > 0) & (exclusive or len(pinned) == categories)
    unfixed, free = categories - int(pins_N[fixed_N].sum()), int((~fixed_N).sum())
    least, most = bounds or (unfixed // max(free, 1), -(-unfixed // max(free, 1)))
    sizes = Sizes(np.where(fixed_N, pins_N, least), np.where(fixed_N, pins_N, most))
    full = int((pins_N - sizes.most_N).argmax())
    if pins_N[full] > sizes.most_N[full]:
        raise RecipeError(
            f"clusters.pinned: cluster {full} gets {pins_N[full]} categories, but clusters take "
            f"{least} to {most}; pin fewer to it, or set clusters.sizes"
        )
    if not np.maximum(sizes.least_N, pins_N).sum() <= categories <= sizes.most_N.sum():
        raise RecipeError(
            f"clusters: {unfixed} categories cannot be put into {free} clusters of {least} to "
            f"{most} around the pinned ones; change clusters.sizes, clusters.count or "
            "clusters.pinned"
        )
    if not sizes.least_N.all():
        raise RecipeError(
            "clusters: a cluster would be empty; pin fewer categories, or lower clusters.count"
        )
    return sizes


def cluster_categories(
    counts_CV: np.ndarray,
    clusters: int,
    pinned: Mapping[int, int] | None = None,
    *,
    bounds: tuple[int, int] | None = None,
    exclusive: bool = False,
    seed: int = 0,
    restarts: int = 16,
) -> np.ndarray:
    """Cluster of each category, ``(C,)`` int; a category counts as one document.

    The pins and bounds are :func:`sizes_of`'s; of ``restarts`` starts of the k-means, the one with
    the least inertia is kept.
    """
    pinned = dict(pinned or {})
    sizes = sizes_of(len(counts_CV), clusters, pinned, bounds=bounds, exclusive=exclusive)
    points_CD = embed(tf_idf(counts_CV), clusters, seed)
    return sized_kmeans(points_CD, sizes, pinned, seed=seed, restarts=restarts)


def tf_idf(counts_CV: np.ndarray) -> np.ndarray:
    """scikit-learn's TF-IDF with smoothed inverse frequencies, rows of length 1."""
    from sklearn.feature_extraction.text import TfidfTransformer

    return TfidfTransformer().fit_transform(counts_CV).toarray()


def embed(weights_CV: np.ndarray, dimensions: int, seed: int) -> np.ndarray:
    """Spectral embedding of the cosine similarities, ``(C, min(dimensions, C - 2))``.

    Two categories or fewer have no embedding and are returned unchanged.
    """
    from sklearn.manifold import SpectralEmbedding

    if len(weights_CV) < 3:
        return weights_CV
    similar_CC = np.clip(weights_CV @ weights_CV.T, 0.0, 1.0)
    components = min(dimensions, len(weights_CV) - 2)
    # A small constant keeps the graph connected if categories share no token.
    embedding = SpectralEmbedding(components, affinity="precomputed", random_state=seed)
    return embedding.fit_transform(similar_CC + 1e-6)


def sized_kmeans(
    points_CD: np.ndarray,
    sizes: Sizes,
    pinned: Mapping[int, int] | None = None,
    *,
    seed: int = 0,
    restarts: int = 16,
) -> np.ndarray:
    """Cluster of each point by k-means with bounded sizes, ``(C,)`` int.

    Each step is optimal: the assignment for given means (a linear assignment of points to places)
    and the means for a given assignment, so the inertia never rises.
    """
    pinned, clusters = dict(pinned or {}), len(sizes.least_N)
    generator = np.random.default_rng(seed)
    best: tuple[float, np.ndarray] | None = None
    for _ in range(restarts):
        means_ND = _start(points_CD, clusters, pinned, generator)
        labels_C = np.full(len(points_CD), -1)
        for _ in range(ITERATIONS):
            squares_CN = ((points_CD[:, None] - means_ND) ** 2).sum(-1)
            previous, labels_C = labels_C, assign(squares_CN, sizes, pinned)
            if (labels_C == previous).all():
                break
            means_ND = np.stack(
                [points_CD[labels_C == cluster].mean(0) for cluster in range(clusters)]
            )
        inertia = float(squares_CN[np.arange(len(labels_C)), labels_C].sum())
        if best is None or inertia < best[0] - 1e-12:
            best = inertia, labels_C
    assert best is not None
    return best[1]


def assign(
    costs_CN: np.ndarray, sizes: Sizes, pinned: Mapping[int, int] | None = None
) -> np.ndarray:
    """The cheapest assignment of C points to N clusters of bounded sizes, ``(C,)`` int."""
    from scipy.optimize import linear_sum_assignment

    points, clusters = costs_CN.shape
    # A column for each place: cluster n has most_N[n] places, and its first least_N[n] must be
    # filled. Then an optimal assignment of rows to columns keeps both bounds.
    places_P = np.repeat(np.arange(clusters), sizes.most_N)
    first_P = np.repeat(np.cumsum(sizes.most_N) - sizes.most_N, sizes.most_N)
    must_P = np.arange(len(places_P)) - first_P < sizes.least_N[places_P]
    # Rows beyond the points stand for empty places; they are kept out of the places to fill.
    costs_PP = np.zeros((len(places_P), len(places_P)))
    costs_PP[:points] = (costs_CN / (costs_CN.max() or 1.0))[:, places_P]  # at most 1, far < FAR
    costs_PP[points:, must_P] = FAR
    for point, cluster in (pinned or {}).items():
        costs_PP[point, places_P != cluster] = FAR
    _, columns = linear_sum_assignment(costs_PP)
    return places_P[columns[:points]]


def _start(
    points_CD: np.ndarray,
    clusters: int,
    pinned: Mapping[int, int],
    generator: np.random.Generator,
) -> np.ndarray:
    """Means of the pinned points; other clusters start from distant points (k-means++)."""
    means: dict[int, np.ndarray] = {}
    for cluster in sorted(set(pinned.values())):
        points: Sequence[int] = [point for point, pin in pinned.items() if pin == cluster]
        means[cluster] = points_CD[list(points)].mean(0)
    for cluster in range(clusters):
        if cluster in means:
            continue
        if means:
            means_MD = np.stack(list(means.values()))
            nearest_C = ((points_CD[:, None] - means_MD) ** 2).sum(-1).min(1)
        else:
            nearest_C = np.ones(len(points_CD))
        total = nearest_C.sum()
        chances = nearest_C / total if total > 0 else None
        means[cluster] = points_CD[generator.choice(len(points_CD), p=chances)]
    return np.stack([means[cluster] for cluster in range(clusters)])
