"""Ctrl-C during an import, whose code swallows it."""

import importlib
import os
import signal

import pytest

from moe_finetune.io.interrupts import interrupts_outlast_imports

INTERRUPT = "import os, signal, time\nlines = []\n"
SWALLOWED = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    lines.append("swallowed")
"""
CLEANED_UP = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
finally:
    time.sleep(0.5)
    open(os.environ["CLEANED_UP"], "w").close()
"""


@pytest.fixture
def interrupted_import(tmp_path, monkeypatch):
    """Import a module of these lines, then work; the interrupt must end that."""
    monkeypatch.syspath_prepend(tmp_path)
    alarm = signal.getsignal(signal.SIGALRM)

    def run(name, lines, work):
        (tmp_path / f"{name}.py").write_text(INTERRUPT + lines)
        importlib.invalidate_caches()
        with pytest.raises(KeyboardInterrupt), interrupts_outlast_imports():
            work(importlib.import_module(name))
            pytest.fail("the interrupt was lost")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGALRM) is alarm
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

    return run


def count(module):
    for _ in range(10**10):
        pass


def test_an_import_that_swallows_an_interrupt_does_not_lose_it(interrupted_import):
    interrupted_import("swallows_and_ends", SWALLOWED, count)
    interrupted_import("swallows_and_goes_on", SWALLOWED + "while True: pass\n", count)


def test_an_error_that_follows_from_it_is_the_interrupt(interrupted_import):
    interrupted_import("half_there", SWALLOWED, lambda module: module.ndarray)


def test_what_cleans_up_is_not_interrupted_again(interrupted_import, tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANED_UP", str(tmp_path / "done"))
    interrupted_import("cleans_up", CLEANED_UP, count)
    assert (tmp_path / "done").is_file()


def test_elsewhere_an_interrupt_and_errors_are_as_ever():
    with pytest.raises(KeyboardInterrupt), interrupts_outlast_imports():
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the interrupt was lost")
    with pytest.raises(ZeroDivisionError), interrupts_outlast_imports():
        _ = 1 / 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
