"""A warm program is, to whoever starts it, a process like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("warm")
SHOWN = "tests.warm_shown"


def start(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", SHOWN, *arguments], text=True, **options)


def test_it_has_what_it_was_given(tmp_path):
    kept = os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT)
    process = start(
        "say", "two words", str(kept), cwd=tmp_path, env={**os.environ, "MARK": "seen"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        pass_fds=(kept,), start_new_session=True,
    )  # fmt: skip
    out, err = process.communicate("read\n", timeout=60)
    said = json.loads(out)
    assert process.returncode == 7 and err == "to stderr\n"
    assert said["pid"] == said["session"] == process.pid != os.getpid()
    assert said["parent"] == os.getpid()
    assert said["arguments"] == ["say", "two words", str(kept)] and said["read"] == "read\n"
    assert said["folder"] == str(tmp_path) and said["mark"] == "seen" and said["main"] == SHOWN
    assert said["imported"], "it was forked"
    assert (tmp_path / "kept").read_text() == "kept"
    os.close(kept)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_it_and_what_it_started_goes_on(number, tmp_path):
    process = start("parent", str(tmp_path / "child"), stdout=subprocess.PIPE)
    child = psutil.Process(int(process.stdout.readline()))
    assert child.ppid() == process.pid and os.getsid(child.pid) == os.getsid(0)
    process.send_signal(number)
    assert process.wait(60) == (1 if number == signal.SIGINT else -number)
    process.stdout.close()
    assert child.is_running() and child.ppid() != os.getpid()
    child.kill()


def test_a_cold_start_is_kept_where_imports_would_differ(tmp_path):
    process = start("say", "", "1", env={**os.environ, "HF_HUB_OFFLINE": "2"},
                    stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)  # fmt: skip
    assert not json.loads(process.communicate()[0].removeprefix("kept"))["imported"]
