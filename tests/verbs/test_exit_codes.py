"""1 where the machine failed, 2 where the input is wrong, through any number of layers."""

import errno
import os
import signal

import pytest
import torch
from safetensors import SafetensorError

from moe_finetune import cli
from moe_finetune.cli import main
from moe_finetune.errors import DataError, DiskSpaceError, is_machine_failure, reason_of


def full_disk():
    with open("/dev/full", "w") as file:
        file.write("x")


def full_disk_in_rust():
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


def too_much_memory():
    torch.empty(1 << 50)


@pytest.mark.parametrize("fail", [full_disk, full_disk_in_rust, too_much_memory])
def test_the_machine_is_found_behind_an_error_of_ours(fail):
    with pytest.raises(DataError) as problem:
        try:
            fail()
        except Exception:
            raise DataError("data: cannot be prepared") from None
    assert is_machine_failure(problem.value)
    assert is_machine_failure(DiskSpaceError("full"))
    assert not is_machine_failure(DataError("line 3"))
    assert not is_machine_failure(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def test_a_path_that_cannot_be_used_is_a_wrong_input(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "run", tmp_path / ("a" * 300)):
        assert main(["convert", str(tmp_path), "--output", str(output)]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "command", "line"),
    [
        ("evaluation.engine.evaluate", "eval BASE -s demo -o OUT", "the same command continues"),
        ("report.analysis.analyze", "analyze BASE -d ROWS -o OUT", "nothing was written"),
        ("checkpoint.convert_checkpoint.convert_checkpoint", "convert BASE -o OUT",
         "nothing was written"),
        ("demo.demo.run_demo", "demo --output OUT", "the same command continues"),
        ("study.commands.carry_out_study", "study paper4 -o OUT", "with --resume"),
        ("run.run_recipe", "train RECIPE -o OUT", "nothing was written; repeat"),
    ],
)  # fmt: skip
def test_sigterm_ends_every_verb_as_ctrl_c_does(
    target, command, line, tmp_path, monkeypatch, capsys, tiny_checkpoint
):
    """Outside the steps of training, too: a scheduler tells preempted from failed by the code."""
    base, rows, recipe = tiny_checkpoint("olmoe"), tmp_path / "d.jsonl", tmp_path / "r.yaml"
    rows.write_text('{"text": "a"}\n')
    recipe.write_text(f"model: {{path: {base}}}\ndata: {{train: {rows}}}\n")
    names = {"BASE": base, "ROWS": rows, "OUT": tmp_path / "out", "RECIPE": recipe}
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        f"moe_finetune.{target}", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert cli.main([str(names.get(word, word)) for word in command.split()]) == 130
    said = capsys.readouterr().err
    assert said.count("interrupted") == 1 and line in said
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\ntwo", "one"),
        ("Class validation error for validator 'x':\n    ValueError: 3 layers, 2 types\nmore",
         "Class validation error for validator 'x': ValueError: 3 layers, 2 types"),
        ("ends:", "ends:"),
        ("", "ValueError"),
    ],
)  # fmt: skip
def test_a_reason_is_not_cut_at_a_colon(text, reason):
    assert reason_of(ValueError(text)) == reason
