"""A folder that appears whole or not at all: written under a hidden name, synced, renamed."""

import difflib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_finetune.errors import DiskSpaceError, OutputExistsError
from moe_finetune.io.atomic import sync
from moe_finetune.io.leftovers import claim, clear_beside, contents

# Directory entries and file-system blocks, besides the contents.
_OVERHEAD = 4 << 20


def is_taken(folder: Path) -> bool:
    """Return whether ``folder`` exists and is not an empty folder."""
    return folder.exists() and (not folder.is_dir() or bool(contents(folder)))


def like(path: Path, others: Iterable[Path]) -> str:
    """``"; did you mean 'runs/first'?"`` for the nearest name of ``others``, or ``""``."""
    by_name = {other.name: other for other in others}
    near = difflib.get_close_matches(path.name, by_name, n=1)
    return f"; did you mean '{by_name[near[0]]}'?" if near else ""


def enter_folder(output: Path, mark: Path, what: str, resume: bool) -> bool:
    """Whether ``output`` contains earlier work to continue.

    ``mark`` is the file or folder in it that is made first, and ``what`` the command's product,
    such as ``"a study"``; with ``resume``, an empty or missing folder still returns False.
    """
    if mark.exists():
        if resume:
            return True
        raise OutputExistsError(
            f"{output} already contains {what}; choose another --output, or add --resume to "
            "continue it"
        )
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output}: is a file, not a folder; choose another --output")
    if is_taken(output):
        raise OutputExistsError(f"{output} contains other files; choose another --output")
    return False


def check_output(target: Path, overwrite: bool = False) -> None:
    """Raise OutputExistsError unless ``target`` is free (or empty, or may be replaced)."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OutputExistsError(f"{target}: is a file or link; choose another --output")
    if is_taken(target) and not overwrite:
        raise OutputExistsError(f"{target}: is not empty; choose another --output")


@contextmanager
def output_folder(target: Path, size: int, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty hidden folder that becomes ``target`` when the block ends without an error.

    Files written there must have been synced by the writer. On an error the hidden folder is
    removed and ``target`` does not change. ``size`` bytes must be free.
    """
    target = Path(os.path.abspath(target))
    check_output(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_beside(target)
    check_space(target, size)
    partial, lock = claim(target, _make)
    try:
        yield partial
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            sync(folder)
        _put_in_place(partial, target, overwrite)
        sync(target.parent)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"{target.parent}: no space left"
                + (f" while writing {_shown(size)}" if size else "")
                + "; free some space or choose another --output"
            ) from problem
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def check_space(target: Path, size: int) -> None:
    """Raise DiskSpaceError unless ``size`` bytes fit on the disk that ``target`` will be on."""
    folder = Path(os.path.abspath(target)).parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size + _OVERHEAD:
        raise DiskSpaceError(
            f"{folder}: {_shown(size + _OVERHEAD)} are needed, but only {_shown(free)} are free; "
            "free some space or choose another --output"
        )


def _shown(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def write_small(folder: Path, name: str, content: bytes) -> None:
    """Write and sync one small file under ``folder``."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that an interrupted removal cannot be mistaken for a complete folder."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _make(partial: Path) -> int:
    partial.mkdir()
    return os.open(partial, os.O_RDONLY | os.O_DIRECTORY)


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename ``partial`` to ``target``; the old folder is removed afterwards."""
    if not (overwrite and target.is_dir() and any(target.iterdir())):
        try:
            partial.rename(target)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputExistsError(
                    f"{target}: appeared while it was being written; choose another --output"
                ) from problem
            raise
        return
    # If this process dies, the next run removes the old folder by its hidden name.
    old = target.parent / f".{target.name}.partial-old-{secrets.token_hex(4)}"
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
