"""Routing against the token."""

import math

import pytest

from moe_finetune.metrics.tokens import token_consistency


def test_consistency_counts_repeated_tokens_only():
    # a: 1, 1, 5 -> 2 of 3; b: 2, 6 -> 1 of 2; c occurs once
    assert token_consistency("abacab", [1, 2, 1, 3, 5, 6]) == pytest.approx(3 / 5)
    assert math.isnan(token_consistency("abc", [1, 2, 3]))
