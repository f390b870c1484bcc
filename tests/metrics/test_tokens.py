"""Routing against the token, and how far groups of points lie apart."""

import math

import numpy as np
import pytest

from moe_finetune.metrics.projections import spread_between
from moe_finetune.metrics.tokens import token_consistency


def test_consistency_counts_repeated_tokens_only():
    # a: 1, 1, 5 -> 2 of 3; b: 2, 6 -> 1 of 2; c occurs once
    assert token_consistency("abacab", [1, 2, 1, 3, 5, 6]) == pytest.approx(3 / 5)
    assert math.isnan(token_consistency("abc", [1, 2, 3]))


def test_spread_between_groups_equals_the_formula():
    rng = np.random.default_rng(4)
    points_N2, groups_N = rng.normal(size=(60, 2)), rng.integers(0, 3, 60)
    points_N2 = points_N2 + groups_N[:, None]
    total = sum(((p - points_N2.mean(0)) ** 2).sum() for p in points_N2)
    within = sum(
        ((p - points_N2[groups_N == g].mean(0)) ** 2).sum()
        for p, g in zip(points_N2, groups_N, strict=True)
    )
    assert spread_between(points_N2, groups_N) == pytest.approx(1 - within / total)
    assert spread_between(np.array([[0.0, 1], [0, 1], [5, 1]]), np.array([7, 7, 8])) == 1.0
    assert math.isnan(spread_between(np.empty((0, 2)), np.empty(0)))
