"""What an entry point may give as a metric."""

import pytest

from moe_finetune.metrics.layer_metric import LayerMetric, Word, problem_of


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (7, "is 7, and must be"),
        (LayerMetric(max, Word("largest")), "whose parameters cannot be read"),
        (LayerMetric(lambda colors: 1.0, Word("colors")), "reads 'colors'"),
    ],
)
def test_what_is_no_metric_is_described(value, problem):
    assert problem in problem_of(value)
