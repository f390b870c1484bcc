"""Categories -> N clusters of equal size: TF-IDF, spectral embedding, balanced k-means.

Shape legend: C categories, V vocabulary, N clusters, D dimensions of the embedding. Sizes are
numbers of categories and differ by one at most. Source: P3 §3.1; the balanced k-means alternates
an optimal assignment to places (scipy) with means, as k-means with size constraints does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moe_finetune.errors import RecipeError

ITERATIONS = 100
FAR = 1e9


def cluster_categories(
    counts_CV: np.ndarray,
    clusters: int,
    pinned: Mapping[int, int] | None = None,
    *,
    seed: int = 0,
    restarts: int = 16,
) -> np.ndarray:
    """Cluster of each category, ``(C,)`` int.

    Args:
        counts_CV: occurrences of every token in each category: a category is one document.
        clusters: N, at most C.
        pinned: category -> cluster, kept as it is.
        seed: of the embedding and of the starts.
        restarts: starts of the balanced k-means; the one of least inertia counts.

    Raises:
        RecipeError: fewer categories than clusters, or pins that leave no equal sizes.
        ValueError: counts that are not a matrix of non-negative numbers.
    """
    counts_CV = np.asarray(counts_CV)
    if counts_CV.ndim != 2 or (counts_CV < 0).any():
        raise ValueError(f"counts_CV: got shape {counts_CV.shape}, wanted (C, V) counts >= 0")
    check_pins(len(counts_CV), clusters, dict(pinned or {}))
    points_CD = embed(tf_idf(counts_CV), clusters, seed)
    return balanced_kmeans(points_CD, clusters, pinned, seed=seed, restarts=restarts)


def check_pins(categories: int, clusters: int, pinned: Mapping[int, int]) -> None:
    """Raise RecipeError unless ``categories`` can be put into equal clusters around the pins."""
    if categories < clusters:
        raise RecipeError(
            f"texts.categories: {categories} categories are fewer than the {clusters} clusters; "
            "give more categories or lower clusters.count"
        )
    least, over = divmod(categories, clusters)
    sizes = np.bincount(list(pinned.values()), minlength=clusters)
    full = int(sizes.argmax())
    larger = int((sizes > least).sum())
    if sizes.max(initial=0) > least + bool(over) or larger > over:
        raise RecipeError(
            f"clusters.pinned: cluster {full} gets {sizes[full]} categories, and {categories} "
            f"categories in {clusters} equal clusters are {least}"
            + (f" each, {over} of them {least + 1}" if over else " each")
            + ": another cluster would stay empty or too small; pin fewer to it"
        )


def tf_idf(counts_CV: np.ndarray) -> np.ndarray:
    """scikit-learn's TF-IDF with smoothed inverse frequencies, rows of length 1."""
    from sklearn.feature_extraction.text import TfidfTransformer

    return TfidfTransformer().fit_transform(counts_CV).toarray()


def embed(weights_CV: np.ndarray, dimensions: int, seed: int) -> np.ndarray:
    """Spectral embedding of the cosine similarities, ``(C, min(dimensions, C - 2))``.

    Two categories stay as they are: they have no embedding.
    """
    from sklearn.manifold import SpectralEmbedding

    if len(weights_CV) < 3:
        return weights_CV
    similar_CC = np.clip(weights_CV @ weights_CV.T, 0.0, 1.0)
    components = min(dimensions, len(weights_CV) - 2)
    # A small constant keeps categories without a common token in one connected graph.
    embedding = SpectralEmbedding(components, affinity="precomputed", random_state=seed)
    return embedding.fit_transform(similar_CC + 1e-6)


def balanced_kmeans(
    points_CD: np.ndarray,
    clusters: int,
    pinned: Mapping[int, int] | None = None,
    *,
    seed: int = 0,
    restarts: int = 16,
) -> np.ndarray:
    """k-means whose clusters differ in size by one at most, ``(C,)`` int.

    Each step is optimal: the assignment for given means (a linear assignment of points to places)
    and the means for a given assignment, so the inertia never rises.
    """
    pinned = dict(pinned or {})
    generator = np.random.default_rng(seed)
    best: tuple[float, np.ndarray] | None = None
    for _ in range(restarts):
        means_ND = _start(points_CD, clusters, pinned, generator)
        labels_C = np.full(len(points_CD), -1)
        for _ in range(ITERATIONS):
            squares_CN = ((points_CD[:, None] - means_ND) ** 2).sum(-1)
            previous, labels_C = labels_C, assign(squares_CN, pinned)
            if (labels_C == previous).all():
                break
            means_ND = np.stack([points_CD[labels_C == n].mean(0) for n in range(clusters)])
        inertia = float(squares_CN[np.arange(len(labels_C)), labels_C].sum())
        if best is None or inertia < best[0] - 1e-12:
            best = inertia, labels_C
    assert best is not None
    return best[1]


def assign(costs_CN: np.ndarray, pinned: Mapping[int, int] | None = None) -> np.ndarray:
    """Cheapest assignment of C points to N clusters whose sizes differ by one at most."""
    from scipy.optimize import linear_sum_assignment

    points, clusters = costs_CN.shape
    least, over = divmod(points, clusters)
    costs_CN = costs_CN / (costs_CN.max() or 1.0)
    places = np.repeat(np.arange(clusters), least)
    costs_CP = costs_CN[:, places]
    if over:
        # One more place a cluster, so dear that the others are filled first.
        places = np.concatenate([places, np.arange(clusters)])
        costs_CP = np.concatenate([costs_CP, costs_CN + 2.0 * points], axis=1)
    for point, cluster in (pinned or {}).items():
        costs_CP[point, places != cluster] = FAR
    rows, columns = linear_sum_assignment(costs_CP)
    labels_C = np.empty(points, dtype=np.int64)
    labels_C[rows] = places[columns]
    return labels_C


def _start(
    points_CD: np.ndarray,
    clusters: int,
    pinned: Mapping[int, int],
    generator: np.random.Generator,
) -> np.ndarray:
    """Means of the pinned points; for the other clusters points far from those (k-means++)."""
    means: dict[int, np.ndarray] = {}
    for cluster in sorted(set(pinned.values())):
        own: Sequence[int] = [point for point, place in pinned.items() if place == cluster]
        means[cluster] = points_CD[list(own)].mean(0)
    for cluster in range(clusters):
        if cluster in means:
            continue
        if means:
            held = np.stack(list(means.values()))
            nearest_C = ((points_CD[:, None] - held) ** 2).sum(-1).min(1)
        else:
            nearest_C = np.ones(len(points_CD))
        total = nearest_C.sum()
        chances = nearest_C / total if total > 0 else None
        means[cluster] = points_CD[generator.choice(len(points_CD), p=chances)]
    return np.stack([means[cluster] for cluster in range(clusters)])
