"""A row between reading and preparing: what comes out is what went in."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pytest

from moe_finetune.data.exact_rows import row_of_text, row_text
from moe_finetune.errors import DataError

ROW = {
    "texts": ["", "7", "\ud83d a half", "line\n\u2028end", None],
    "numbers": [True, 7, 7.0, 2**70 + 1, -0.1, 1e308],
    "objects": [{"a": 1}, {"b": None}, {}, {"7": []}],
    "days": [datetime(2026, 11, 28, 1, 2, 3, 4, UTC), datetime(2026, 1, 2), date(2026, 3, 4)],
    "times": [time(5, 6, 7), timedelta(-1, 2, 3), timedelta(400)],
    "others": {"bytes": [b"", b"\x00\xff"], "decimal": Decimal("0.10")},
    "moe_finetune.value": ["bytes", "AA=="],
    "like ours": [
        {"moe_finetune.value": ["bytes", "AA=="]},
        {"moe_finetune.value": {"moe_finetune.value": ["object", [b"\x01"]]}},
        {"moe_finetune.value": None, "and": "more"},
    ],
}


def typed(value):
    if isinstance(value, dict):
        return {name: typed(part) for name, part in value.items()}
    return list(map(typed, value)) if isinstance(value, list) else (type(value), value)


@pytest.mark.parametrize(
    "row", [ROW, {"moe_finetune.value": 7}, {"moe_finetune.value": ["decimal", "1"]}, {}]
)
def test_a_row_comes_back_with_types(row):
    assert typed(row_of_text(row_text("a:1", row))) == typed(row)


@pytest.mark.parametrize("value", [float("nan"), date(2026, 3, 4), b"", Decimal(1)])
def test_a_plain_row_has_only_values_that_a_template_writes(value):
    with pytest.raises(DataError, match=r"a\.jsonl:3: a value is neither text nor a number"):
        row_text("a.jsonl:3", {"x": [value]}, plain=True)


def test_a_value_without_a_text_is_refused_with_its_place():
    with pytest.raises(DataError, match=r"a\.jsonl:3: a value cannot be stored: set is neither"):
        row_text("a.jsonl:3", {"x": {1, 2}})
