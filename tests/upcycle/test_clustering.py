import itertools

import numpy as np
import pytest

from moe_finetune.upcycle.clustering import (
    Sizes,
    assign,
    cluster_categories,
    sized_kmeans,
    sizes_of,
)


def sizes(labels, clusters):
    return sorted(np.bincount(labels, minlength=clusters).tolist())


def best_by_hand(costs, bounds: Sizes, pinned):
    """Least cost over all assignments that keep the bounds."""
    points, clusters = costs.shape
    best = np.inf
    for labels in itertools.product(range(clusters), repeat=points):
        counts = np.bincount(labels, minlength=clusters)
        kept = (bounds.least_N <= counts).all() and (counts <= bounds.most_N).all()
        if kept and all(labels[p] == c for p, c in pinned.items()):
            best = min(best, sum(costs[p, c] for p, c in enumerate(labels)))
    return best


@pytest.mark.parametrize(
    ("points", "clusters", "pinned", "options"),
    [
        (6, 3, {}, {}),
        (7, 3, {}, {}),
        (5, 3, {}, {}),
        (8, 3, {4: 0}, {}),
        (7, 2, {0: 1, 3: 1, 5: 0}, {}),
        (3, 3, {2: 0}, {}),
        (7, 3, {}, {"bounds": (1, 4)}),
        (8, 3, {0: 2, 5: 2, 6: 2, 7: 2}, {"bounds": (1, 5)}),
        (8, 3, {4: 1}, {"exclusive": True}),
        (8, 4, {0: 3, 1: 3, 2: 0}, {"exclusive": True, "bounds": (1, 4)}),
        (6, 3, {0: 1, 1: 1, 2: 1, 3: 1, 4: 0, 5: 2}, {}),
    ],
)
def test_the_assignment_is_the_cheapest_that_keeps_the_sizes(points, clusters, pinned, options):
    generator = np.random.default_rng(points * 10 + clusters)
    bounds = sizes_of(points, clusters, pinned, **options)
    for _ in range(5):
        costs = generator.exponential(size=(points, clusters)) * 7
        labels = assign(costs, bounds, pinned)
        total = costs[np.arange(points), labels].sum()
        assert total == pytest.approx(best_by_hand(costs, bounds, pinned))
        counts = np.bincount(labels, minlength=clusters)
        if not options and len(pinned) < points:
            assert counts.max() - counts.min() <= 1
        if options.get("exclusive"):
            assert all(counts[n] == sum(c == n for c in pinned.values()) for n in pinned.values())


def test_more_starts_never_give_a_worse_clustering():
    points_CD = np.random.default_rng(3).normal(size=(20, 4))

    def inertia(restarts):
        labels = sized_kmeans(points_CD, sizes_of(20, 4, {}), seed=5, restarts=restarts)
        return sum(
            ((points_CD[labels == n] - points_CD[labels == n].mean(0)) ** 2).sum() for n in range(4)
        )

    found = [inertia(restarts) for restarts in (1, 4, 16, 64)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


def planted(kinds=5, each=3, vocabulary=83, seed=2):
    """Categories whose tokens come from a distribution of their kind, in a shuffled order."""
    generator = np.random.default_rng(seed)
    kind_C = generator.permutation(np.repeat(np.arange(kinds), each))
    tokens_KV = generator.dirichlet(np.full(vocabulary, 0.1), size=kinds)
    counts_CV = np.stack([generator.multinomial(4000, tokens_KV[kind]) for kind in kind_C])
    return counts_CV, kind_C


def test_categories_of_a_kind_meet():
    counts_CV, kind_C = planted()
    labels = cluster_categories(counts_CV, 5, seed=0)
    together = labels[:, None] == labels
    assert (together == (kind_C[:, None] == kind_C)).all()
    assert (labels == cluster_categories(counts_CV, 5, seed=0)).all(), "a seed decides"


def test_pins_are_kept_and_others_follow_them():
    counts_CV, kind_C = planted()
    first = {kind: int(np.flatnonzero(kind_C == kind)[0]) for kind in range(5)}
    pinned = {first[0]: 3, first[1]: 2, first[4]: 0}
    labels = cluster_categories(counts_CV, 5, pinned)
    for category, cluster in pinned.items():
        assert labels[category] == cluster
        assert (labels[kind_C == kind_C[category]] == cluster).all()


def test_sizes_may_be_unequal_and_pinned_clusters_closed():
    counts_CV, kind_C = planted(kinds=3, each=4)
    small = np.flatnonzero(kind_C == 0)[:3].tolist()
    rest = [c for c in range(12) if c not in small]
    labels = cluster_categories(counts_CV, 3, dict.fromkeys(small, 2), exclusive=True)
    assert np.flatnonzero(labels == 2).tolist() == small
    free = cluster_categories(counts_CV[rest], 3, bounds=(1, 5))
    together = kind_C[rest][:, None] == kind_C[rest]
    assert ((free[:, None] == free) == together).all()
    assert sizes(free, 3) == [1, 4, 4]


def test_a_table_of_a_paper_is_taken_as_it_is():
    pinned = dict(enumerate([1, 1, 1, 1, 0, 2, 2]))
    counts_CV, _ = planted(kinds=7, each=1)
    assert cluster_categories(counts_CV, 3, pinned).tolist() == list(pinned.values())
