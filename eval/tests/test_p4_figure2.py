"""Figure 2's choices against slow searches, and the barrier where theory puts it."""

import itertools

import numpy as np
import pytest

from eval.effects.p4_figure2 import (
    greedy_choice,
    optimal_choice,
    random_features,
    recovery,
    run,
    worst_features,
)
from moe_finetune.metrics import coherence_barrier, mutual_coherence


def _distance(features_NH, target_H, chosen) -> float:
    span = features_NH[list(chosen)].T
    weights = np.linalg.lstsq(span, target_H, rcond=None)[0]
    return float(((target_H - span @ weights) ** 2).sum() / (target_H**2).sum())


def test_the_optimal_subset_is_the_one_of_a_slow_search_over_all():
    rng = np.random.default_rng(3)
    features_BNH, target_BH = rng.standard_normal((4, 7, 9)), rng.standard_normal((4, 9))
    chosen_Bk = optimal_choice(features_BNH, target_BH, 3)
    for features_NH, target_H, chosen_k in zip(features_BNH, target_BH, chosen_Bk, strict=True):
        subsets = list(itertools.combinations(range(7), 3))
        best = min(subsets, key=lambda s, f=features_NH, y=target_H: _distance(f, y, s))
        assert tuple(chosen_k) == best


def test_the_greedy_choice_takes_the_largest_absolute_inner_products():
    features_BNH = np.array([[[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0], [0.0, 1.0]]])
    target_BH = np.array([[1.0, 0.5]])  # scores 1, 1, -1, 0.5: ties go to the lower id
    np.testing.assert_array_equal(greedy_choice(features_BNH, target_BH, 3), [[0, 1, 2]])
    np.testing.assert_array_equal(greedy_choice(features_BNH, target_BH, 1), [[0]])


@pytest.mark.parametrize("coherence", [0.02, 0.3, 0.9])
def test_random_features_have_the_coherence_asked_for(coherence):
    features_BNH = random_features(5, 11, 13, coherence, np.random.default_rng(1))
    assert features_BNH.shape == (5, 11, 13)
    np.testing.assert_allclose(np.linalg.norm(features_BNH, axis=-1), 1)
    coherences = [mutual_coherence(features_NH) for features_NH in features_BNH]
    np.testing.assert_allclose(coherences, coherence, atol=1e-9)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_on_worst_features_greedy_fails_exactly_above_the_barrier(k):
    barrier = coherence_barrier(k)
    answer = np.arange(k)[None]
    for coherence, right in ((barrier * 0.999, 1.0), (barrier * 1.001, 0.0)):
        features_NH = worst_features(k + 5, k, coherence)
        assert mutual_coherence(features_NH) == pytest.approx(coherence)
        shares = recovery(features_NH[None], answer)
        assert shares["greedy"] == right
        assert shares["optimal"] == 1.0


def test_recovery_is_a_mean_over_trials():
    # Above the barrier of 1/5 the outsider takes the place of one of the three.
    features_NH = worst_features(6, 3, 0.25)
    shares = recovery(np.stack([features_NH, np.eye(6)]), np.tile(np.arange(3), (2, 1)))
    assert shares == {"greedy": 0.5, "optimal": 1.0}


def test_the_sweep_recovers_below_the_barrier_and_repeats():
    options = {"count": 9, "k": 4, "width": 10, "trials": 6, "coherences": (0.05, 1 / 7.1, 0.9)}
    sweep = run(options, {}, 7)
    assert sweep["barrier"] == pytest.approx(1 / 7)
    assert [row["greedy"] for row in sweep["random"][:2]] == [1.0, 1.0]
    assert [row["optimal"] for row in sweep["random"]] == [1.0, 1.0, 1.0]
    assert sweep == run(options, {}, 7)
    assert sweep != run(options, {}, 8)


def test_impossible_features_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="width is 5; it must be at least count=6"):
        random_features(2, 6, 5, 0.1, rng)
    with pytest.raises(ValueError, match=r"coherence is 0\.99"):
        random_features(2, 4, 5, 0.99, rng)
    with pytest.raises(ValueError, match="less than 1/6"):
        worst_features(8, 6, 0.2)
    with pytest.raises(ValueError, match="more than k=6"):
        worst_features(6, 6, 0.1)


def test_weights_of_a_target_that_hide_a_feature_and_turn_one_round():
    """On orthonormal features a score is a weight: of -2, 0.3 and 0 greedy misses one."""
    features_BNH, answer_Bk = np.eye(5)[None], np.array([[1, 2, 4]])
    assert recovery(features_BNH, answer_Bk, np.array([[-2.0, 0.3, 0.0]]))["greedy"] == 0
    assert recovery(features_BNH, answer_Bk, np.array([[-2.0, 0.3, 0.1]]))["greedy"] == 1


def test_gaussian_weights_are_harder_than_equal_ones_at_the_barrier():
    options = {"count": 16, "k": 6, "width": 32, "trials": 60, "coherences": (1 / 11,)}
    sweep = run(options, {}, 3)
    assert sweep["random"][0]["greedy"] == 1.0
    assert 0.2 < sweep["gaussian"][0]["greedy"] < 0.8
    assert sweep["gaussian"][0]["optimal"] == 1.0
