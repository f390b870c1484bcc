"""`make test-newest` tests the versions of ``newest.txt``, without what is hidden there."""

import importlib.metadata as metadata
from importlib.util import find_spec

from tests.conftest import NEWEST


def test_the_versions_are_the_newest_and_nothing_of_older_ones_is_here():
    assert {name: metadata.version(name) for name in NEWEST["install"]} == NEWEST["install"]
    assert NEWEST["hide"] and not [name for name in NEWEST["hide"] if find_spec(name)]
