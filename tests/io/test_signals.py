"""SIGTERM ends a command as Ctrl-C does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from moe_finetune.io.signals import sigterm_interrupts


def test_it_raises_what_ctrl_c_raises_and_the_handler_goes():
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_code_that_swallows_it_does_not_continue():
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            raise ImportError("half a module") from None


def test_a_forked_worker_ends_by_the_signal_itself():
    with sigterm_interrupts():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_train_ends_with_130_and_how_to_continue_from_its_first_line_on(tmp_path):
    """It ended by the signal, without a word, while libraries were imported."""
    recipe = tmp_path / "my.yaml"
    recipe.write_text("model: {path: gone}\ndata: {train: gone.jsonl}\n")
    command = [sys.executable, "-m", "moe_finetune", "train", str(recipe), "--output", "runs/a"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert first.startswith("train: sft of gone")
    assert process.returncode == 130 and "Traceback" not in rest
    assert "othing was written; repeat the command" in rest
