"""What other processes are doing, read from the files that they write."""

import io
import os
import time

import pytest
from rich.console import Console

from moe_finetune.io import terminal as terminal_module
from moe_finetune.io.child_progress import RunProgress, Watch
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import Terminal, use_terminal
from moe_finetune.io.terminal_board import Board, Phase


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "erc")
    run.path.mkdir()
    return run


def write(file, text: str, seconds: float) -> None:
    """Append to a file that then was written ``seconds`` from now."""
    with file.open("a") as stream:
        stream.write(text)
    when = time.time() + seconds
    os.utime(file, (when, when))


def test_steps_loss_and_time_left(run, tmp_path):
    log = tmp_path / "erc.log"
    write(run.metrics, '{"kind": "train", "step": 7, "loss": 9.5}\n', -100)
    write(log, "an earlier attempt\n", -100)
    progress = RunProgress(run, log)
    assert progress.text() == "starts"  # neither file is of this process
    write(log, "loading\rweights 40 %\n\n", 5)
    assert progress.text() == "weights 40 %"
    write(run.metrics, '{"kind": "train", "step": 10, "loss": 2.25}\n{"kind": "tr', 10)
    assert progress.text() == "step 10  loss 2.25"
    run.note(max_steps=50)
    write(run.metrics, 'ain", "step": 20, "loss": 1.5}\n{"kind": "eval", "step": 20}\n', 35)
    assert progress.text() == "step 20/50  loss 1.5  1:15 left"
    run.adapter.mkdir()
    write(log, "merge        3.1 s\n", 40)
    assert progress.text() == "merge        3.1 s"


def test_without_a_terminal_the_status_replaces_the_time(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal_module, "SILENT", 0.05)
    log = tmp_path / "erc.log"
    watch = Watch([RunProgress(run, log)])
    write(log, "loads\n", 5)
    previous = use_terminal(Terminal("plain"))
    try:
        with terminal_module.terminal().phase("study"):
            watch()
            while not (lines := capsys.readouterr().err):
                time.sleep(0.01)
    finally:
        use_terminal(previous)
    assert lines == "erc: loads\n"


def test_a_live_terminal_has_a_line_for_each_process():
    phase = Phase("fine-tune")
    phase.status = ["aux_loss: step 3/9  loss 2.5", "erc: starts"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Board(lambda: phase))
    first, second, last = console.export_text().splitlines()
    assert (first.rstrip(), second.rstrip()) == tuple(phase.status) and "fine-tune" in last
