"""Nouns and verbs in the number of what they count."""

import pytest

from moe_finetune.io.counted import counted, in_number


@pytest.mark.parametrize(
    ("count", "noun", "clause"),
    [
        (0, "0 rows", "are of their kind, were cut and change"),
        (1, "1 row", "is of its kind, was cut and changes"),
        (1234, "1,234 rows", "are of their kind, were cut and change"),
    ],
)
def test_words_follow_the_count(count, noun, clause):
    template = "{are} of {their} kind, {were} cut and {change}"
    assert (counted(count, "row"), in_number(template, count)) == (noun, clause)
