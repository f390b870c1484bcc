"""Every method, checkpointed and sharded on two ranks, has the gradients of the plain model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.sharded_worker import CASES, MODES, WORLD

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded") / "found.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_PORT": port}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.sharded_worker", str(out)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **{name: str(value) for name, value in shared.items()},
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(WORLD)
    ]
    for process in running:
        _, text = process.communicate(timeout=500)
        assert process.returncode == 0, text[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_plain_model(found, case, mode):
    got = found[case][mode]
    assert "error" not in got, got["error"]
    assert got["gradients"] <= LIMIT
    assert got["biases"] == 0.0
    for plain, here in got["losses"]:
        assert here == pytest.approx(plain, rel=LIMIT, abs=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_the_gradients_are_not_those_without_a_method(found, case):
    assert found[case]["plain"]["acts"] > 100 * LIMIT
