"""Other trainers' packages, which ``make test-integrations`` installs in build/integrations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def environment_of(host):
    folder = Path(os.environ.get("HOSTS", ROOT / "build" / "integrations")) / host
    if not folder.is_dir():
        pytest.skip(f"{host} is not installed; run make test-integrations")
    return folder


def python(packages, arguments, folder, variables=()):
    """Python with a host's packages over the environment's, without network and GPU."""
    environment = os.environ | dict(variables)
    environment |= {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    environment |= {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
