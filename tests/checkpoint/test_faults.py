"""A merge that is killed, raises or meets another one leaves nothing or the whole."""

import random
import signal
import subprocess
import sys

import pytest

from moe_finetune.checkpoint import merge_adapter
from moe_finetune.errors import OutputExistsError
from moe_finetune.io import output_folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.faults
@pytest.mark.slow
def test_killed_at_random_moments(warm, bases, adapters, tmp_path, repetition):
    """SIGKILL after a random number of written pieces, the last few during sync and rename."""
    base, adapter, target = bases("qwen3_moe"), adapters("qwen3_moe"), tmp_path / "merged"
    merge_adapter(base, adapter, tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    chooser = random.Random(repetition)
    partial = 0
    for moment in (chooser.randrange(1, 100), 130):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.slow_merge", base, adapter, target],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(moment):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        partial += bool(list(tmp_path.glob(".merged.partial-*")))
        assert not target.exists() or contents(target) == wanted
    assert partial
    merge_adapter(base, adapter, target, overwrite=True)
    assert contents(target) == wanted
    assert {p.name for p in tmp_path.iterdir()} == {"whole", "merged"}


def test_error_in_the_middle(bases, adapters, tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(bases("olmoe"), adapters("olmoe"), tmp_path / "m", progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(
            bases("olmoe"), adapters("olmoe"), tmp_path / "m", progress=stop, overwrite=True
        )
    assert contents(tmp_path / "m") == {"old": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_target_appears_meanwhile(tmp_path):
    with (
        pytest.raises(OutputExistsError, match="appeared"),
        output_folder(tmp_path / "m", 10) as folder,
    ):
        (folder / "new").write_text("new")
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").write_text("theirs")
    assert contents(tmp_path / "m") == {"theirs": b"theirs"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_output_is_hidden_until_it_is_whole(tmp_path):
    with output_folder(tmp_path / "deep" / "m", 10) as folder:
        (folder / "new").write_text("new")
        assert not (tmp_path / "deep" / "m").exists()
    assert contents(tmp_path / "deep" / "m") == {"new": b"new"}
