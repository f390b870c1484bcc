"""A folder that appears whole or not at all.

It is written under a hidden sibling name, synced to the disk and renamed. The writer holds a lock
on the hidden folder as long as it lives, so that a later run can tell one that was left behind by a
killed process from one that is being written.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_finetune.errors import MoeFinetuneError, OutputExistsError

# Directory entries and file-system blocks beside the contents.
_OVERHEAD = 4 << 20


class DiskSpaceError(MoeFinetuneError, OSError):
    """A disk without room for what is to be written."""


def check_output(target: Path, overwrite: bool = False) -> None:
    """Raise OutputExistsError unless ``target`` is free (or empty, or may be replaced)."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OutputExistsError(f"{target}: is a file or link; choose another output folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise OutputExistsError(
            f"{target}: is not empty; choose another output folder or pass overwrite"
        )


@contextmanager
def output_folder(target: Path, size: int, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty hidden folder that becomes ``target`` when the block ends without an error.

    Files written there must have been synced by the writer. On an error the hidden folder is
    removed and ``target`` is what it was.

    Args:
        target: the folder that will appear; its parents are made.
        size: bytes that will be written, for the check of free space.
        overwrite: replace an existing folder.

    Raises:
        OutputExistsError: ``target`` holds something and ``overwrite`` is False.
        DiskSpaceError: less than ``size`` is free, or space ran out while writing.
    """
    target = Path(os.path.abspath(target))
    check_output(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_stale(target)
    free = shutil.disk_usage(target.parent).free
    if free < size + _OVERHEAD:
        raise DiskSpaceError(
            f"{target.parent}: {size / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "make room or choose another output folder"
        )
    partial, lock = _locked_sibling(target)
    try:
        yield partial
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            _sync_folder(folder)
        _put_in_place(partial, target, overwrite)
        _sync_folder(target.parent)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"{target.parent}: no space left while writing {size / 1e9:.2f} GB; "
                "make room or choose another output folder"
            ) from problem
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def clean_stale(target: Path) -> None:
    """Remove hidden folders of ``target`` whose writer is dead."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)


def write_small(folder: Path, name: str, content: bytes) -> None:
    """Write and sync one small file under ``folder``."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _locked_sibling(target: Path) -> tuple[Path, int]:
    """A new hidden folder and a descriptor that holds its lock."""
    while True:
        partial = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        # Another run may have taken the folder for a stale one before the lock was held.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(partial).st_ino == os.fstat(lock).st_ino:
                return partial, lock
        os.close(lock)


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename ``partial`` to ``target``; what was there before is removed afterwards."""
    if not (overwrite and target.is_dir() and any(target.iterdir())):
        try:
            partial.rename(target)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputExistsError(
                    f"{target}: appeared while it was being written; choose another output folder"
                ) from problem
            raise
        return
    # The old folder gets a hidden name that the next run cleans if this one dies in between.
    old = target.parent / f".{target.name}.partial-old-{secrets.token_hex(4)}"
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
