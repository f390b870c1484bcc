"""One writer per output: a lock that the kernel releases when its process ends.

The lock is on ``.NAME.lock`` next to the output NAME, so that a folder may be new, stay empty and
be renamed. The file names its owner, for the error message of other processes. It is removed when
the lock is released; the next process takes over the file of a killed one.
"""

import datetime
import errno
import fcntl
import functools
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from moe_finetune.errors import OutputBusyError, OutputError
from moe_finetune.io.leftovers import clear_beside

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_RETRIES = 1000
"""Times that the lock's file or folder may vanish in a row; /proc never accepts a file."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class OutputLock:
    """A lock that this process has taken.

    Attributes:
        target: the output that it protects.
        file: the lock's file; None if the folder itself is locked.
        made: folders created for the lock, the innermost first.
    """

    def __init__(self, target: Path, descriptor: int, file: Path | None, made: list[Path]):
        self.target, self.descriptor, self.file, self.made = target, descriptor, file, made

    @contextmanager
    def open_to_helpers(self) -> Iterator[None]:
        """Let processes that take the lock as ``shared`` work at the same time.

        Raises:
            OutputBusyError: some of them still run at the end.
        """
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        try:
            yield
        finally:
            exclusive = _take(self.descriptor, fcntl.LOCK_EX, False)
        if not exclusive:
            raise _busy(self.target, self.file)

    def release(self) -> None:
        """Release the lock; remove its file unless another process has the lock."""
        try:
            if self.file is not None and _take(self.descriptor, fcntl.LOCK_EX, False):
                self.file.unlink(missing_ok=True)
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # forked children may have the lock too
        finally:
            os.close(self.descriptor)
        for folder in self.made:
            with suppress(OSError):  # no longer empty
                folder.rmdir()


_held: dict[tuple[Path, int], OutputLock] = {}


@contextmanager
def output_lock(target: Path, *, shared: bool = False, wait: bool = False) -> Iterator[OutputLock]:
    """Be the only writer of ``target``, a file or folder that need not exist.

    Hidden files of killed writers are removed first. A thread may take its lock again. Folders
    created only for the lock are removed with it.

    Args:
        shared: be one of several processes that share the output and keep others out.
        wait: wait until the lock is free, instead of raising.

    Raises:
        OutputBusyError: another process or thread is writing there; the message names it.
        OutputError: the parent folder of ``target`` cannot be created or written.
    """
    target = Path(os.path.realpath(target))
    key = target, threading.get_ident()
    if key in _held:
        yield _held[key]
        return
    lock = _held[key] = _acquire(target, shared, wait)
    try:
        if not shared:
            clear_beside(target)
        yield lock
    finally:
        if _held.pop(key, None) is not None:  # otherwise this is a fork
            lock.release()


def helpers_only(target: Path) -> bool:
    """Return whether ``target`` is locked by processes that share it, and not exclusively."""
    target = Path(os.path.realpath(target))
    if not target.name:
        return False
    file = target.with_name(f".{target.name}.lock")
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _take(descriptor, fcntl.LOCK_EX, False) and _take(
            descriptor, fcntl.LOCK_SH, False
        )
    finally:
        os.close(descriptor)


def one_writer(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: ``function`` locks its argument ``output``, unless its ``dry_run`` is true."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("dry_run"):
            return function(*args, **kwargs)
        with output_lock(Path(bound.arguments["output"])):
            return function(*args, **kwargs)

    return locked


def _acquire(target: Path, shared: bool, wait: bool) -> OutputLock:
    kind, new_folders = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, list[Path]()
    if not target.name:
        raise OutputError(
            f"{target}: cannot be the root of the file system; choose another --output"
        )
    path = target.with_name(f".{target.name}.lock")
    for _ in range(_RETRIES):
        new_folders += _make_folders(path.parent)
        file: Path | None = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # the previous owner of a lock has just removed the folder
        except OSError as problem:
            # The output is an existing folder inside a read-only one.
            if not target.is_dir():
                raise OutputError(
                    f"{path.parent}: cannot be written ({problem.strerror}); "
                    "choose another --output"
                ) from None
            descriptor, file = os.open(target, os.O_RDONLY), None
        try:
            if not _take(descriptor, kind, wait):
                raise _busy(target, file)
            # The previous owner may have removed the file, and another process locked a new one.
            if _same(descriptor, file or target):
                if file is not None:
                    _sign(descriptor)
                return OutputLock(target, descriptor, file, new_folders)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OutputError(f"{path.parent}: files cannot be created there; choose another --output")


def _make_folders(folder: Path) -> list[Path]:
    """Create ``folder``; return the folders that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"{existing}: is not a folder; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        return []  # its parent is gone again; the caller retries
    except OSError as problem:
        raise OutputError(
            f"{folder}: cannot be created ({problem.strerror}); choose another --output"
        ) from None
    return missing


def _take(descriptor: int, kind: int, wait: bool) -> bool:
    """Take the lock; return False if another process has it."""
    try:
        fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno not in _UNSUPPORTED:
            raise
        log.warning(
            "this file system has no locks (%s); make sure that no other process writes to the "
            "output",
            problem.strerror,
        )
    return True


def _same(descriptor: int, path: Path) -> bool:
    try:
        on_disk = os.stat(path)
    except FileNotFoundError:
        return False
    locked = os.fstat(descriptor)
    return (on_disk.st_dev, on_disk.st_ino) == (locked.st_dev, locked.st_ino)


def _sign(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk; only the message needs it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()} {since}\n".encode(), 0)


def _busy(target: Path, file: Path | None) -> OutputBusyError:
    owner = "another process"
    with suppress(OSError, ValueError):  # the owner may not have written its name yet
        if file is not None:
            pid, host, since = file.read_text(encoding="utf-8").split()
            where = "" if host == socket.gethostname() else f" on {host}"
            owner = f"process {pid}{where}, since {since}"
    return OutputBusyError(
        f"{target} is being written by {owner}; wait for it to end, or choose another --output"
    )


def _after_fork() -> None:
    # The lock is the parent's: a child that outlives it must not keep it.
    for lock in _held.values():
        with suppress(OSError):
            os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
