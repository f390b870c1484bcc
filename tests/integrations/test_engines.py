"""Engines with MoE blocks of their own: examples of docs/other-trainers.md, on real packages.

``make test-integrations`` installs them; without that the tests are skipped.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import ROOT
from tests.integrations.environments import environment_of
from tests.ranks import run_ranks

PAGE = ROOT / "docs" / "other-trainers.md"


@pytest.mark.slow
def test_torchtitan_blocks_under_fsdp2_have_our_losses_and_gradients(monkeypatch):
    packages = environment_of("torchtitan")
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}")
    run_ranks("tests.integrations.torchtitan_worker", 2, PAGE)
