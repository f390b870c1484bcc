"""A process beside this one: answers in order, errors as they were raised, and its end."""

import fractions
import logging
import operator
import os
import time

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.io.terminal import terminal
from moe_finetune.io.worker import Worker, WorkerError
from moe_finetune.recipe.tree import load_tree
from tests.conftest import ROOT


def terminal_says(text, level):
    terminal().say(text, level)


def test_calls_are_done_in_order_in_one_other_process(tmp_path):
    with Worker(tmp_path / "log", {"MARK": "theirs"}) as worker:
        first = worker.begin(os.getpid)
        shown = worker.begin(os.getenv, "MARK")
        half = worker.begin(fractions.Fraction, 3, denominator=6)
        assert half.result() == fractions.Fraction(1, 2), "the last may be asked for first"
        assert first.result() == worker.call(os.getpid) != os.getpid()
        assert shown.result() == "theirs" and os.getenv("MARK") is None


def test_an_error_of_ours_comes_back_and_another_is_in_the_log(tmp_path):
    log = tmp_path / "log"
    with Worker(log) as worker:
        failed = worker.begin(load_tree, ["nowhere.yaml"])
        other = worker.begin(operator.truediv, 1, 0)
        with pytest.raises(RecipeError, match=r"there is no recipe file nowhere\.yaml"):
            failed.result()
        with pytest.raises(WorkerError, match="ZeroDivisionError: division by zero"):
            other.result()
        assert worker.call(operator.add, 2, 3) == 5, "it goes on"
    assert "ZeroDivisionError" in log.read_text()


def test_a_process_that_ends_says_why(tmp_path):
    with Worker(tmp_path / "log") as worker:
        ended = worker.begin(os._exit, 7)
        behind = worker.begin(os.getpid)
        for pending in (ended, behind):
            with pytest.raises(WorkerError, match="exit code 7: it printed nothing"):
                pending.result()


def test_leaving_ends_a_call_that_nobody_waits_for(tmp_path):
    before = time.monotonic()
    with Worker(tmp_path / "log") as worker:
        worker.begin(time.sleep, 60)
    assert time.monotonic() - before < 30
    assert worker._process.returncode is not None


def test_warnings_of_a_call_are_shown_where_it_is_asked_for(tmp_path, capsys):
    with Worker(tmp_path / "log", {"PYTHONPATH": str(ROOT)}) as worker:
        worker.call(terminal_says, "the disk is slow", "warning")
        assert capsys.readouterr().err == "the disk is slow\n"
        worker.call(terminal_says, "all is well", "info")
        worker.call(logging.getLogger("moe_finetune.there").warning, "the router is frozen")
        worker.call(logging.getLogger("elsewhere").warning, "chatter")
    assert capsys.readouterr().err == "warning: the router is frozen\n"
    written = (tmp_path / "log").read_text()
    assert all(s in written for s in ("disk is slow", "is well", "router is frozen", "chatter"))
