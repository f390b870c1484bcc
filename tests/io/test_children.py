"""Servers of ours end with us, also when they ignore signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from moe_finetune.errors import MachineError
from moe_finetune.vllm.serve import run_server
from tests.processes import ended
from tests.vllm_server import ROOT

STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.fork()  # as vLLM's engine
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
OWNER = """
import sys
from moe_finetune.io import children
from moe_finetune.vllm.serve import run_server
children.STOP_SECONDS = 0.5
try:
    sys.exit(run_server([sys.executable, "-c", sys.argv[1]]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def owner():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids: list[int] = []
    try:
        pids += [int(process.stdout.readline()) for _ in range(2)]
        yield process, pids
    finally:
        process.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_ignores_signals_ends_with_all_its_processes(owner, signum):
    process, pids = owner
    process.send_signal(signum)
    assert process.wait() == 130
    assert all(map(ended, pids))


def test_a_server_ends_when_its_owner_is_killed(owner):
    process, pids = owner
    server = next(pid for pid in pids if parent(pid) == process.pid)
    process.kill()
    process.wait()
    assert ended(server)


def test_the_exit_code_is_the_servers():
    with pytest.raises(MachineError, match="vllm serve: killed by SIGKILL"):
        run_server([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert run_server([sys.executable, "-c", "import sys; sys.exit(7)"]) == 7


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
