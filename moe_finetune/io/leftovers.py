"""Unfinished outputs have a hidden name and a lock; those of killed writers have no lock.

An unfinished file or folder is ``.NAME.partial-XXXXXXXX`` next to NAME. Its writer locks it, and
the kernel releases the lock when the process ends, so that a later process can tell abandoned
outputs from those being written.
"""

import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PARTIAL = re.compile(r"\..+\.partial(-old)?-[0-9a-f]{8}")
_LOCK = re.compile(r"\..+\.lock")


def contents(folder: Path) -> list[Path]:
    """A folder's entries, without hidden outputs that are abandoned or still being written."""
    return [path for path in folder.iterdir() if not _hidden(path.name)]


def claim(target: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Create the hidden sibling of ``target``; return its path and the descriptor that locks it.

    ``make`` creates and opens the path, or raises FileExistsError.
    """
    while True:
        partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        try:
            descriptor = make(partial)
        except FileExistsError:
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed it as abandoned before it was locked.
        with suppress(FileNotFoundError):
            if os.stat(partial).st_ino == os.fstat(descriptor).st_ino:
                return partial, descriptor
        os.close(descriptor)


def clear_beside(target: Path) -> None:
    """Remove hidden files of killed writers next to ``target``.

    If a writer died while replacing an old folder, the old one gets its name back.
    """
    for partial in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if partial.name.startswith(f".{target.name}.partial-old-") and not target.exists():
            partial.rename(target)
        elif _PARTIAL.fullmatch(partial.name):
            remove_if_left(partial)


def clear_leftovers(folder: Path) -> None:
    """Remove hidden files of killed writers inside ``folder``, a known output."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if _hidden(name):
                remove_if_left(Path(parent, name))
        folders[:] = [name for name in folders if not _hidden(name)]


def remove_if_left(path: Path) -> None:
    """Remove a hidden file or folder unless its writer is still running."""
    with suppress(OSError):
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _hidden(name: str) -> bool:
    return bool(_PARTIAL.fullmatch(name) or _LOCK.fullmatch(name))
