"""Intervals and tests of differences, against enumeration, loops, other libraries and a null."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from moe_finetune.evaluation.statistics import (
    compare_items,
    compare_seeds,
    crossed_bootstrap,
    holm,
    mcnemar,
    paired_bootstrap,
    relative_gain,
    t_interval,
    wilson,
)


def test_the_interval_is_students():
    values = [0.3, -0.1, 0.7, 0.2, 0.45]
    found = t_interval(values)
    wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.mean, found.seeds) == (pytest.approx(np.mean(values)), 5)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
    alone = t_interval([0.4])
    assert (alone.mean, alone.low, alone.high) == (0.4, -np.inf, np.inf)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_an_interval_of_nothing_or_of_no_number_is_refused(values):
    with pytest.raises(ValueError, match="expected at least one, all finite"):
        t_interval(values)


def exact_mcnemar(gained, lost):
    """Every way to assign the discordant pairs, by enumeration."""
    observed = abs(gained - lost)
    outcomes = list(itertools.product((1, -1), repeat=gained + lost))
    return sum(abs(sum(o)) >= observed for o in outcomes) / len(outcomes)


@pytest.mark.parametrize(("gained", "lost"), [(5, 1), (0, 7), (3, 3), (9, 4), (1, 0)])
def test_mcnemar_is_the_enumerated_sign_test(gained, lost):
    assert mcnemar(gained, lost) == pytest.approx(exact_mcnemar(gained, lost))
    assert mcnemar(0, 0) == 1.0


def test_holm_by_hand():
    # Sorted: .005 x4, .01 x3, .03 x2, .04 x1 -> .02, .03, .06, .06 (running maximum).
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_bootstrap_agrees_with_the_normal_approximation_and_covers():
    rng = np.random.default_rng(3)
    sample = rng.normal(0.3, 1.0, 400)
    low, high, p = paired_bootstrap(sample, np.random.default_rng(0))
    error = sample.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(sample.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(sample.mean() + 1.96 * error, abs=0.1 * error)
    assert p < 0.001
    assert paired_bootstrap(np.zeros(10), np.random.default_rng(0))[2] == 1.0
    assert paired_bootstrap(np.array([0.3]), np.random.default_rng(0)) == (0.3, 0.3, 1.0)
    covered = sum(
        low <= 0 <= high
        for low, high, _ in (
            paired_bootstrap(rng.normal(0, 1, 60), rng, resamples=500) for _ in range(200)
        )
    )
    assert 0.89 <= covered / 200 <= 0.99


def test_relative_gain_is_the_unweighted_mean_over_cells():
    assert relative_gain([(0.6, 0.5, True), (0.3, 0.4, True), (1.0, 0.5, True)]) == pytest.approx(
        (0.2 - 0.25 + 1.0) / 3
    )
    assert relative_gain([(0.7, 0.5, True), (0.6, 0.0, True)]) is None
    with pytest.raises(ValueError, match="at least one cell"):
        relative_gain([])


@pytest.mark.parametrize(("count", "n"), [(0, 7), (3, 41), (41, 41)])
def test_wilson_is_scipys(count, n):
    wanted = stats.binomtest(count, n).proportion_ci(0.95, "wilson")
    assert wilson(count / n, n) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_crossed_bootstrap_against_a_loop():
    rng = np.random.default_rng(3)
    difference_SN = rng.normal(0.3, 1.0, (3, 7))
    seeds, items = difference_SN.shape
    observed = difference_SN.mean()
    draw, means = np.random.default_rng(8), []
    for _ in range(20_000):
        s, i = draw.integers(0, seeds, seeds), draw.integers(0, items, items)
        total = sum(difference_SN[a, b] for a in s for b in i)
        means.append(total / (seeds * items))
    wide = (np.array(means) - observed) * math.sqrt(seeds / (seeds - 1))
    low, high, p = crossed_bootstrap(difference_SN, np.random.default_rng(5), 20_000)
    assert low == pytest.approx(observed + np.quantile(wide, 0.025), abs=0.03)
    assert high == pytest.approx(observed + np.quantile(wide, 0.975), abs=0.03)
    assert p == pytest.approx((np.abs(wide) >= abs(observed) - 1e-12).mean(), abs=0.02)


def test_one_seed_is_the_comparison_of_two_evaluations():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2, (2, 1, 41)).astype(float)
    found = compare_items(a, b)
    gained, lost = int((a > b).sum()), int((a < b).sum())
    assert (found.name, found.p) == ("McNemar", mcnemar(gained, lost))
    assert found.difference == pytest.approx((gained - lost) / 41)
    graded = compare_items(a * 0.5, b)
    low, high, p = paired_bootstrap((a * 0.5 - b)[0], np.random.default_rng(0))
    assert (graded.name, graded.low, graded.high, graded.p) == ("bootstrap", low, high, p)


def test_seeds_that_disagree_make_many_items_uncertain():
    """The difference is the seeds': 400 items agree with their seed, 4 seeds differ in sign."""
    seeds_S = np.array([0.3, -0.25, 0.28, -0.2])
    difference_SN = np.repeat(seeds_S[:, None], 400, 1)
    one = paired_bootstrap(difference_SN.mean(0) + 1e-9, np.random.default_rng(1))
    assert one[2] < 0.001, "over items alone the mean would be certain"
    assert compare_items(difference_SN, np.zeros_like(difference_SN)).p > 0.3


def test_false_alarms_under_a_null_with_seed_and_item_effects():
    """No more than 5 % (and sampling error) of studies without an effect come out significant."""
    rng = np.random.default_rng(11)
    alarms, trials = 0, 300
    for _ in range(trials):
        seed_effect, item_effect = rng.normal(0, 0.2, (5, 1)), rng.normal(0, 0.5, (1, 60))
        noise = rng.normal(0, 0.5, (5, 60))
        alarms += crossed_bootstrap(seed_effect + item_effect + noise, rng, 500)[2] < 0.05
    assert alarms / trials < 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / trials)


def test_power_where_there_is_an_effect():
    rng = np.random.default_rng(2)
    values_SN = (rng.random((5, 200)) < 0.7).astype(float)
    base_SN = (rng.random((5, 200)) < 0.5).astype(float)
    found = compare_items(values_SN, base_SN)
    assert found.name == "seeds and items" and found.p < 0.001
    assert found.low < found.difference < found.high and found.low > 0


def test_whole_runs_by_student():
    a, b = np.array([1.0, 1.4, 1.9, 1.2]), np.array([0.9, 1.5, 1.5, 1.0])
    found, wanted = compare_seeds(a, b), stats.ttest_rel(a, b)
    interval = wanted.confidence_interval(0.95)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert compare_seeds(a, a).p == 1.0
    for values in (a[:1], a[:1] + 1), (a[:2], a[:2] - 0.3):  # 1.0 - 0.7 is not 1.4 - 1.1
        found = compare_seeds(*values)
        assert (found.name, found.p, found.low) == ("not enough seeds", None, None)
        found.decide(higher_is_better=True)
        assert found.verdict == "unknown"
    assert compare_seeds(a, np.array([1.0, math.nan, 2.0, 3.0])).name == "none"


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((3,), (3,)), ((0, 4), (0, 4))])
def test_wrong_shapes(shapes):
    with pytest.raises(ValueError, match=r"values_SN .*expected one shape \(seeds, items\)"):
        compare_items(np.zeros(shapes[0]), np.zeros(shapes[1]))
