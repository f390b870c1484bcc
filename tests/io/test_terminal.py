"""What a command shows: live, plain, quiet; and libraries' output in a file."""

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from moe_finetune.cli.app import split_common
from moe_finetune.io.terminal import (
    OWN,
    Records,
    Terminal,
    curve,
    duration,
    terminal,
    use_terminal,
    whole_words,
)


@pytest.fixture
def on(monkeypatch):
    """A terminal of a style that writes to a text, in use while the test lasts."""
    made = []

    def make(style="plain", quiet=False) -> tuple[Terminal, io.StringIO]:
        text = io.StringIO()
        chosen = Terminal(style, quiet)
        chosen._stream = text
        made.append(use_terminal(chosen))
        return chosen, text

    yield make
    if made:
        use_terminal(made[0])


def test_a_phase_is_one_line_with_its_time(on):
    shown, text = on()
    with shown.phase("merge"):
        shown.progress(1, 2)
    with pytest.raises(ValueError, match="broken"), shown.phase("verify"):
        raise ValueError("broken")
    first, second = text.getvalue().splitlines()
    assert re.fullmatch(r"merge {8}\d+\.\d s", first)
    assert re.fullmatch(r"verify {7}stopped after \d+\.\d s", second)


def test_progress_is_a_line_at_most_every_half_minute(on, monkeypatch):
    shown, text = on()
    now = [1000.0]
    monkeypatch.setattr("moe_finetune.io.terminal.time.monotonic", lambda: now[0])
    with shown.phase("merge"):
        for done in range(1, 100):
            now[0] += 1
            shown.progress(done, 400, "note")
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["8", "15", "22"]
    assert lines[-1] == "merge        1:39"


def test_a_command_that_says_nothing_says_what_it_does(on, monkeypatch):
    """Loading and verifying a real model was silent for minutes."""
    monkeypatch.setattr("moe_finetune.io.terminal.SILENT", 0.2)
    shown, text = on()
    with shown.phase("verify"):
        while not text.getvalue():
            time.sleep(0.01)
    first, last = text.getvalue().splitlines()
    assert re.fullmatch(r"verify {7}at work for \d+\.\d s", first) and last.startswith("verify ")
    monkeypatch.setattr("moe_finetune.io.terminal.SILENT", 1.0)
    quick, text = on()
    with quick.phase("merge"):  # longer than that, but never without a line
        for _ in range(8):
            time.sleep(0.15)
            quick.say("a line")
    assert "at work" not in text.getvalue()


def test_quiet_leaves_warnings(on):
    shown, text = on(quiet=True)
    with shown.phase("merge"):
        shown.say("detail")
        shown.say("careful", "warning")
    assert text.getvalue() == "careful\n"


def test_log_records_of_ours_are_said_and_a_warning_once(on):
    _, text = on()
    handler, ours = Records(), logging.getLogger(f"{OWN}.test")
    for level, words in ((20, "fact"), (30, "careful"), (30, "careful"), (30, "WARNING: bad")):
        handler.emit(ours.makeRecord(ours.name, level, "f", 1, words, (), None))
    assert text.getvalue().splitlines() == ["fact", "warning: careful", "WARNING: bad"]


def test_a_live_terminal_shows_values_and_leaves_lines():
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    shown = Terminal("live")
    shown._stream = os.fdopen(slave, "w", encoding="utf-8")
    rows = [("load balance", "8.31", "8.244", "▁▄█"), ("MaxVio", "2.379", "2.33", "█▁▃")]
    with shown.phase("train"):
        shown.show(rows)
        shown.progress(3, 12, "step 3/12  59 tokens/s  9.7 s left")
        shown.say("warning: careful", "warning")
        shown._live.refresh()
    shown._stream.flush()
    shown._stream.close()
    seen = ""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(master, 1 << 16):
            seen += piece.decode()
    os.close(master)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    for words in ("load balance", "8.244", "▁▄█", "step 3/12", "25 %", "warning: careful"):
        assert words in plain, words
    assert re.search(r"train {8}\d+\.\d s\n$", plain)


def test_what_libraries_and_children_write_goes_to_the_log(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from moe_finetune.io.terminal import Terminal
shown = Terminal("plain", capture=True)
with shown.log_to(Path({str(tmp_path / "run.log")!r})):
    print("a library")
    print("its bar", file=sys.stderr)
    os.system("echo a child")
    shown.say("ours")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("after\n", "ours\n")
    held = (tmp_path / "run.log").read_text()
    assert sorted(held.splitlines()) == ["a child", "a library", "its bar"]


def test_streams_come_back_after_an_error(tmp_path, capfd):
    shown = Terminal("plain", capture=True)
    with pytest.raises(RuntimeError), shown.log_to(tmp_path / "run.log"):
        os.write(2, b"inside\n")
        raise RuntimeError
    os.write(2, b"outside\n")
    assert capfd.readouterr().err == "outside\n"
    assert (tmp_path / "run.log").read_text() == "inside\n"


def test_common_options_stand_anywhere_before_two_dashes():
    rest, common = split_common(["--quiet", "train", "r.yaml", "--", "--debug"])
    assert rest == ["train", "r.yaml", "--", "--debug"]
    assert common.quiet and not common.debug


def test_training_lines(on):
    from moe_finetune.training.run_log import LiveTable

    now = SimpleNamespace(global_step=0, max_steps=12, is_world_process_zero=True)
    logs = {"loss": 2.5, "num_tokens": 70.0, "losses/load_balance": 8.31, "routing/entropy": 0.66,
            "routing/max_violation": 2.379, "tokens_per_second": 1234.5}  # fmt: skip
    table, (shown, text) = LiveTable(), on()
    with shown.phase("train"):
        table.on_train_begin(None, now, None)
        now.global_step = 3
        table.on_step_end(None, now, None)
        table.on_log(None, now, None, logs=dict(logs))
        table.on_log(None, now, None, logs={"train_runtime": 3.0})
    lines = text.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith(
        "step 3/12  loss 2.5  load balance 8.31  MaxVio 2.379  entropy 0.66  1,234 tokens/s"
    )


def test_words():
    assert [duration(s) for s in (4.24, 187, 3753)] == ["4.2 s", "3:07", "1:02:33"]
    assert curve([1.0, 2.0, float("nan"), 8.0]) == "▁▂ █" and curve([1.0]) == ""
    assert isinstance(terminal(), Terminal)


def test_lines_are_broken_between_words():
    text = "  kept   as it is\na path /that/is/longer/than/the/line and its end"
    assert whole_words(text, 20).split("\n") == [
        "  kept   as it is",
        "a path",
        "  /that/is/longer/than/the/line",
        "  and its end",
    ]


def test_a_narrow_live_terminal_tears_no_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = Terminal("live")
    shown._stream = io.StringIO()
    with shown.phase("train"):
        shown.progress(119, 120, "step 119/120  3,176 tokens/s  1:32:00 left")
        shown.say("warning: " + "careful " * 12)
        board = io.StringIO()
        Console(file=board, width=80, force_terminal=True).print(shown._live.get_renderable())
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", board.getvalue()).rstrip().endswith("1:32:00 left")
    assert board.getvalue().count("\n") == 1
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown._stream.getvalue())
    assert said.count("careful") == 12


@pytest.mark.parametrize(
    ("quiet", "line"), [(False, "merge        loading libraries\n"), (True, "")]
)
def test_a_silent_start_says_so_once(on, quiet, line):
    shown, text = on(quiet=quiet)
    with shown.starting("merge", 0.0):
        while not quiet and not text.getvalue():
            time.sleep(0.001)
    assert text.getvalue() == line
    with shown.starting("convert", 1e9):
        pass
    assert text.getvalue() == line
