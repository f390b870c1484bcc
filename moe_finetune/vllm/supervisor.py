"""Run a command so that it and all its children end with its parent, even after SIGKILL.

``python -ISP supervisor.py PARENT COMMAND...`` leads its own session. The kernel signals it when
PARENT dies, and it kills its process group: the command and all its descendants. Other signals are
left to the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_DIED = signal.SIGUSR1


def supervised(command: Sequence[str]) -> list[str]:
    """Arguments that run ``command`` under this process; start them in a new session."""
    return [sys.executable, "-ISP", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> int:
    """Run ``command`` and return its exit code."""
    signal.signal(_DIED, _end_all)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            signal_number, _leave_to_the_command
        )  # SIG_IGN would be the command's as well
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _DIED, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # the parent died before the kernel was asked for the signal
    code = subprocess.Popen(command).wait()
    if code < 0:  # end as the command did
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _end_all(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _leave_to_the_command(*_: object) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
