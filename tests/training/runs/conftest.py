"""What a run starts, a rehearsal of its trainer, is forked from a process that has imported all."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _warm(warm):
    pass
