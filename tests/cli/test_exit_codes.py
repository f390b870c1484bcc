"""1 where the machine failed, 2 where the input is wrong, through any number of layers."""

import errno
import os

import pytest
import torch
from safetensors import SafetensorError

from moe_finetune.cli import main
from moe_finetune.errors import DataError, DiskSpaceError, is_machine_failure


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
