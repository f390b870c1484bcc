"""Child processes: why they failed, and signals that reach them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from moe_finetune.io.children import Failure, run_child, run_children
from moe_finetune.io.terminal import terminal


def test_why_a_process_failed(tmp_path):
    code = "import sys; print('error: it is broken'); sys.exit(2)"
    log = tmp_path / "x" / "a.log"
    assert run_child([sys.executable, "-c", code], log) == Failure("it is broken")
    ok = [sys.executable, "-c", "pass"]
    bad = [sys.executable, "-c", code]
    assert run_children({"a": ok, "b": bad}, tmp_path, 2) == Failure("b: it is broken")
    assert run_children({"a": ok, "b": ok, "c": ok}, tmp_path, 2) is None
    full = [sys.executable, "-c", code.replace("exit(2)", "exit(1)")]
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    for command in (full, killed):
        failure = run_child(command, tmp_path / "m.log")
        assert failure.machine


def test_a_failure_is_said_before_the_others_have_stopped(tmp_path, monkeypatch):
    slow = (
        "import pathlib, signal, sys, time\n"
        "ended = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(1), ended.touch(), sys.exit(130)))\n"
        "pathlib.Path(sys.argv[2]).touch()\ntime.sleep(60)"
    )
    fails = (
        "import os, pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)"
    )
    ended, ready = tmp_path / "ended", tmp_path / "ready"
    said = []
    monkeypatch.setattr(
        terminal(), "say", lambda text, level="info": said.append((text, ended.exists()))
    )
    commands = {"a": [sys.executable, "-c", slow, str(ended), str(ready)],
                "b": [sys.executable, "-c", fails, str(ready)]}  # fmt: skip
    failure = run_children(commands, tmp_path / "logs", 2)
    assert failure.machine and "b: killed by SIGKILL" in failure.reason
    assert said == [("b failed; stopping the others", False)] and ended.exists()


PARENT = """
import sys
from pathlib import Path
from moe_finetune.io.children import run_children
child = "import signal,sys,time,pathlib\\n" \\
    "signal.signal(signal.SIGTERM, lambda *a: (pathlib.Path(sys.argv[1]).write_text('saved')," \\
    "sys.exit(130)))\\npathlib.Path(sys.argv[1]).write_text('ready')\\ntime.sleep(60)"
folder = Path(sys.argv[1])
names = {n: [sys.executable, "-c", child, str(folder / n)] for n in ("a", "b")}
try:
    run_children(names, folder / "logs", 2)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_sigterm_reaches_every_child_and_all_are_waited_for(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    files: list[Path] = [tmp_path / "a", tmp_path / "b"]
    while not all(file.exists() and file.read_text() == "ready" for file in files):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait() == 130
    assert [file.read_text() for file in files] == ["saved", "saved"]
