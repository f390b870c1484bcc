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
_held: dict[tuple[Path, int], int] = {}
"""(output, thread) -> descriptor of its lock."""


@contextmanager
def output_lock(target: Path, *, wait: bool = False) -> Iterator[None]:
    """Be the only writer of ``target``, a file or folder that need not exist.

    Hidden files of killed writers are removed first. A thread may take its lock again. Folders
    created only for the lock are removed with it.
    """
    target = Path(os.path.realpath(target))
    key = target, threading.get_ident()
    if key in _held:
        yield
        return
    if not target.name:
        raise OutputError(
            f"{target}: cannot be the root of the file system; choose another --output"
        )
    file, new_folders = target.with_name(f".{target.name}.lock"), list[Path]()
    descriptor = _held[key] = _take(target, file, new_folders, wait)
    try:
        clear_beside(target)
        yield
    finally:
        if _held.pop(key, None) is not None:  # otherwise this is a fork
            with suppress(OSError):  # it may be in a folder that is read-only
                file.unlink()
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children may have the lock too
            os.close(descriptor)
            for folder in new_folders:
                with suppress(OSError):  # no longer empty
                    folder.rmdir()


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


def _take(target: Path, file: Path, new_folders: list[Path], wait: bool) -> int:
    """Return a locked descriptor; the innermost of the folders made for it is listed first."""
    for _ in range(_RETRIES):
        locked = file
        new_folders += [path for path in file.parents if not path.exists()]
        existing = next(path for path in file.parents if path.exists())
        if not existing.is_dir():
            raise OutputError(f"{existing}: is not a folder; choose another --output")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # the previous owner of a lock has just removed the folder
        except OSError as problem:
            if not target.is_dir():
                raise OutputError(
                    f"{file.parent}: cannot be written ({problem.strerror}); choose another "
                    "--output"
                ) from None
            # The output is an existing folder inside a read-only one.
            descriptor, locked = os.open(target, os.O_RDONLY), target
        try:
            _flock(descriptor, target, file, wait)
            # The previous owner may have removed the file, and another process locked a new one.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(locked), os.fstat(descriptor)):
                    if locked == file:
                        _sign(descriptor)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OutputError(f"{file.parent}: files cannot be created there; choose another --output")


def _flock(descriptor: int, target: Path, file: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _busy(target, file) from None
    except OSError as problem:
        if problem.errno not in _UNSUPPORTED:
            raise
        log.warning(
            "this file system has no locks (%s); make sure that no other process writes to the "
            "output",
            problem.strerror,
        )


def _sign(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk; only the message needs it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()} {since}\n".encode(), 0)


def _busy(target: Path, file: Path) -> OutputBusyError:
    owner = "another process"
    with suppress(OSError, ValueError):  # the owner may not have written its name yet
        pid, host, since = file.read_text(encoding="utf-8").split()
        where = "" if host == socket.gethostname() else f" on {host}"
        owner = f"process {pid}{where}, since {since}"
    return OutputBusyError(
        f"{target} is being written by {owner}; wait for it to end, or choose another --output"
    )


def _after_fork() -> None:
    # The lock is the parent's: a child that outlives it must not keep it.
    for descriptor in _held.values():
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
