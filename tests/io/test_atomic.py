"""Files appear whole or not at all, on a full disk too; what a killed writer left is removed."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from moe_finetune.errors import DiskSpaceError
from moe_finetune.io import atomic as atomic_module
from moe_finetune.io import clear_beside, clear_leftovers, contents, write_atomic


def test_whole_with_the_mode_of_any_new_file(tmp_path):
    file = tmp_path / "new" / "results.json"
    write_atomic(file, "größer")
    write_atomic(file, b"whole")
    mask = os.umask(0)
    os.umask(mask)
    assert file.read_bytes() == b"whole" and file.stat().st_mode & 0o777 == 0o666 & ~mask
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("place", ["fsync", "rename"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, place):
    file = tmp_path / "summary.json"
    write_atomic(file, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "fsync":
        monkeypatch.setattr(atomic_module.os, "fsync", full)
    else:
        monkeypatch.setattr(type(file), "replace", full)
    with pytest.raises(DiskSpaceError, match=r"summary.json: no space left on the disk"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_only_what_dead_writers_left_is_removed(tmp_path):
    """A writer that was killed, one at work, a user's hidden files, and a lock of each kind."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from moe_finetune.io import output_lock, write_atomic\n"
        "def stop(*_):\n"
        "    print('there', flush=True)\n"
        "    sys.stdin.read()\n"
        "os.fsync = stop\n"
        "with output_lock(Path(sys.argv[1], sys.argv[2])):\n"
        "    write_atomic(Path(sys.argv[1], 'deep', sys.argv[2]), 'x')\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("dead", "live")
    ]
    for writer in writers:
        writer.stdout.readline()
    writers[0].send_signal(signal.SIGKILL)
    writers[0].communicate()
    for name in (".mine.partial", ".partial-0123abcd", "x.partial-0123abcd", ".gitignore"):
        (tmp_path / "deep" / name).write_text("mine")
    try:
        assert len(list((tmp_path / "deep").glob(".dead.partial-*"))) == 1
        clear_leftovers(tmp_path)
        left = sorted(path.name.rpartition("-")[0] or path.name for path in contents(tmp_path))
        assert left == ["deep"] and (tmp_path / ".live.lock").exists()
        assert not (tmp_path / ".dead.lock").exists()
        kept = sorted(path.name for path in (tmp_path / "deep").iterdir())
        assert kept[0] == ".gitignore" and kept[1].startswith(".live.partial-")
        assert kept[2:] == [".mine.partial", ".partial-0123abcd", "x.partial-0123abcd"]
    finally:
        writers[1].communicate("")
    assert (tmp_path / "deep" / "live").read_text() == "x"


def test_only_folders_of_dead_writers_of_the_output_are_removed(tmp_path):
    """A folder whose writer lives stays, and so does another output's."""
    live, dead, other = (
        tmp_path / name
        for name in (".m.partial-0000000a", ".m.partial-0000000b", ".x.partial-0000000a")
    )
    for folder in (live, dead, other):
        folder.mkdir()
        (folder / "part").write_text("x")
    lock = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clear_beside(tmp_path / "m")
        assert {p.name for p in tmp_path.iterdir()} == {live.name, other.name}
    finally:
        os.close(lock)
    clear_beside(tmp_path / "m")
    assert {p.name for p in tmp_path.iterdir()} == {other.name}
