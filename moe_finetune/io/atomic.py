"""Atomic files: a reader sees the old content or the new content, never a part."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from moe_finetune.errors import DiskSpaceError, OutputExistsError
from moe_finetune.io.leftovers import claim


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``, creating its folder; readers see old or new content."""
    _write(path, content, lambda partial: partial.replace(path))


def write_new(path: Path, content: str | bytes) -> None:
    """Write a file that does not exist yet."""
    refuse_existing(path)
    _write(path, content, lambda partial: _appear(partial, path))


def refuse_existing(path: Path) -> None:
    """Raise OutputExistsError where there is something at ``path``, a dangling link included."""
    if path.is_symlink() or path.exists():
        raise OutputExistsError(f"{path} exists; choose another --output")


def _write(path: Path, content: str | bytes, rename: Callable[[Path], object]) -> None:
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial, descriptor = claim(path, _create)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            rename(partial)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"{path}: no space left on the disk; free some space and repeat the command"
            ) from problem
        if problem.filename is not None:  # a hidden name that the user has not chosen
            problem.filename = str(path)
        raise


def _create(partial: Path) -> int:
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _appear(partial: Path, path: Path) -> None:
    """Rename the file to ``path``, unless something exists there."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise OutputExistsError(
            f"{path} appeared while it was being written; choose another --output"
        ) from None
    except OSError:  # a file system without hard links
        refuse_existing(path)
        partial.replace(path)
    else:
        partial.unlink()


def sync(path: Path) -> None:
    """Make the file's content, or the folder's entries, survive a power cut.

    A file that safetensors wrote (mode 0600) gets the mode of any new file, so that a group that
    shares a disk can read it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_file():
            os.fchmod(descriptor, 0o666 & ~_umask())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The umask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
