"""The verdict's numbers against slow loops, and its order."""

import math

import numpy as np
import pytest

from moe_finetune.served.verdict import DRAWS, Difference, Floor, floor_of, judge, spread

LENGTHS = (3, 11, 5, 8, 2, 7, 13)


def differences(scale=1.0, seed=0):
    generator = np.random.default_rng(seed)
    return [np.abs(generator.normal(0, scale, length)) for length in LENGTHS]


def quantile(values, share):
    """The smallest value at which at least ``share`` of all lie at or below it."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def test_mean_percentile_and_intervals_are_those_of_a_loop():
    parts = differences()
    found = spread(parts, seed=5)
    values = [value for part in parts for value in part]
    assert found.mean == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert found.p99 == quantile(values, 0.99)
    means, highest = [], []
    for draw in np.random.default_rng(5).integers(len(parts), size=(DRAWS, len(parts))):
        drawn = [value for prompt in draw for value in parts[prompt]]
        means.append(sum(drawn) / len(drawn))
        highest.append(quantile(drawn, 0.99))
    for interval, numbers in ((found.mean_interval, means), (found.p99_interval, highest)):
        assert interval == pytest.approx(tuple(np.quantile(numbers, [0.025, 0.975])), rel=1e-12)
    assert found.mean_interval[0] < found.mean < found.mean_interval[1]


def test_draws_are_paired():
    """The same prompts for all: a difference that is twice another has twice its interval."""
    parts = differences()
    one, two = spread(parts), spread([2 * part for part in parts])
    assert two.mean_interval == pytest.approx([2 * end for end in one.mean_interval], rel=1e-12)
    assert two.p99_interval == pytest.approx([2 * end for end in one.p99_interval], rel=1e-12)


def test_an_estimated_floor_is_doubled_and_none_is_below_the_least():
    parts = differences(0.01)
    values = np.concatenate(parts)
    measured, estimated = floor_of(parts, True), floor_of(parts, False)
    assert measured.mean == pytest.approx(values.mean())
    assert (estimated.mean, estimated.p99) == pytest.approx((2 * measured.mean, 2 * measured.p99))
    assert measured.measured and "(estimated)" in estimated.text()
    nothing = floor_of([np.zeros(4), np.zeros(3)], False)
    assert (nothing.mean, nothing.p99) == (1e-4, 1e-4)


def exactly(mean, p99, width=0.0):
    return Difference(mean, (mean - width, mean + width), p99, (p99 - width, p99 + width))


FAR = exactly(0.5, 3.0)


@pytest.mark.parametrize(
    ("moved", "tuned", "base", "verdict"),
    [
        (exactly(0.019, 0.3), exactly(0.0, 0.0), FAR, "cannot tell"),
        (exactly(0.3, 0.19), exactly(0.0, 0.0), FAR, "cannot tell"),
        (exactly(0.021, 0.3, width=0.002), exactly(0, 0), FAR, "cannot tell"),
        (FAR, exactly(0.02, 0.2), FAR, "the trained model"),
        (exactly(0.03, 0.3), exactly(0.02, 0.2), exactly(0.02, 0.2), "the trained model"),
        (FAR, exactly(0.019, 0.1, width=0.002), FAR, "the trained model, rounded"),
        (FAR, exactly(0.01, 0.21), FAR, "the trained model, rounded"),
        (FAR, exactly(0.01, 1.1), FAR, "another model"),
        (FAR, FAR, exactly(0.02, 0.2), "the base: the adapter is not applied"),
        (FAR, FAR, exactly(0.01, 0.21), "another model"),
        (FAR, exactly(0.16, 0.9), FAR, "the trained model, rounded"),
        (FAR, exactly(0.17, 0.9), FAR, "another model"),
        (None, exactly(0.02, 0.2), None, "the reference"),
        (None, exactly(0.02, 0.21), None, "not the reference"),
    ],
)
def test_verdicts_in_their_order(moved, tuned, base, verdict):
    assert judge(Floor(0.01, 0.1, True), moved, tuned, base) == verdict
