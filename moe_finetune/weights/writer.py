"""Write weight files from a plan with a few threads and bounded memory.

Every output tensor has a content: a copy of stored bytes, or something that fills its bytes.
Offsets are known from the headers, so threads write anywhere in any order; neighbouring copies
become one kernel-side copy. A file is synced when its last piece is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moe_finetune.weights.headers import Header, TensorInfo
from moe_finetune.weights.tensors import read_into, write_from

_COPY_BYTES = 64 << 20
_FALLBACK_BYTES = 4 << 20

Progress = Callable[[int, int], None]


class Content(Protocol):
    """Fills the bytes of one output tensor."""

    def write(self, fd: int, target: TensorInfo) -> None:
        """Write all of ``target.size`` bytes at ``target.offset`` of ``fd``."""


@dataclass(frozen=True)
class Copy:
    """The stored bytes of ``source``, as they are."""

    source: TensorInfo

    def write(self, fd: int, target: TensorInfo) -> None:
        """See :class:`Content`."""
        copy_range(self.source.file, self.source.offset, fd, target.offset, target.size)


@dataclass(frozen=True)
class Literal:
    """Bytes that are known already."""

    content: bytes

    def write(self, fd: int, target: TensorInfo) -> None:
        """See :class:`Content`."""
        write_from(fd, memoryview(self.content), target.offset)


@dataclass(frozen=True)
class _Piece:
    file: str
    targets: tuple[TensorInfo, ...]
    content: Content

    @property
    def size(self) -> int:
        return sum(target.size for target in self.targets)

    def write(self, fd: int) -> None:
        if isinstance(self.content, Copy):
            source, start = self.content.source, self.targets[0].offset
            copy_range(source.file, source.offset, fd, start, self.size)
        else:
            self.content.write(fd, self.targets[0])


def write_files(
    folder: Path,
    files: Mapping[str, Header],
    contents: Mapping[str, Content],
    workers: int,
    progress: Progress | None = None,
) -> None:
    """Write every file of ``files`` into ``folder``, its tensors from ``contents`` by name.

    Args:
        folder: an existing folder.
        files: file name -> header; the headers' offsets say where each tensor goes.
        contents: tensor name -> content.
        workers: threads; at most twice as many pieces are in flight.
        progress: called with (bytes done, bytes in all) after each piece, in the calling thread.
    """
    total = sum(info.size for header in files.values() for info in header.tensors.values())
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        running: dict[Future[None], int] = {}
        try:
            for piece, out in _pieces(folder, files, contents):
                running[pool.submit(out.write, piece)] = piece.size
                if len(running) >= 2 * workers:
                    done += _collect(running)
                    if progress:
                        progress(done, total)
            while running:
                done += _collect(running)
                if progress:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def copy_range(file: Path, start: int, fd: int, at: int, size: int) -> None:
    """Copy bytes between files inside the kernel, or through a small buffer where it cannot."""
    source = os.open(file, os.O_RDONLY)
    try:
        end, moved = start + size, 0
        while start + moved < end:
            want = end - start - moved
            try:
                count = os.copy_file_range(source, fd, want, start + moved, at + moved)
            except (OSError, AttributeError):
                # Not on this kernel, or not between these two file systems.
                count = min(want, _FALLBACK_BYTES)
                buffer = memoryview(bytearray(count))
                read_into(source, buffer, start + moved)
                write_from(fd, buffer, at + moved)
            if count == 0:
                raise OSError(f"{file}: unexpected end of file at byte {start + moved}")
            moved += count
    finally:
        os.close(source)


class _OutputFile:
    """One file being written; closes and syncs itself after its last piece."""

    def __init__(self, path: Path, header: Header):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._left = sum(info.size for info in header.tensors.values())
        self._lock = threading.Lock()
        write_from(self.fd, memoryview(header.raw), 0)
        os.ftruncate(self.fd, len(header.raw) + self._left)
        if not self._left:
            self._finish()

    def write(self, piece: _Piece) -> None:
        piece.write(self.fd)
        with self._lock:
            self._left -= piece.size
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        os.fsync(self.fd)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pieces(
    folder: Path, files: Mapping[str, Header], contents: Mapping[str, Content]
) -> Iterator[tuple[_Piece, _OutputFile]]:
    for name, header in files.items():
        out = _OutputFile(folder / name, header)
        for piece in _joined(name, header, contents):
            yield piece, out


def _joined(name: str, header: Header, contents: Mapping[str, Content]) -> Iterator[_Piece]:
    """One piece a tensor, neighbouring copies of neighbouring bytes joined up to a limit."""
    run: _Piece | None = None
    for target in header.tensors.values():
        content = contents[target.name]
        if target.size == 0:
            continue
        if run is not None and _continues(run, target, content):
            run = _Piece(name, (*run.targets, target), run.content)
            continue
        if run is not None:
            yield run
        run = _Piece(name, (target,), content)
    if run is not None:
        yield run


def _continues(run: _Piece, target: TensorInfo, content: Content) -> bool:
    if not (isinstance(run.content, Copy) and isinstance(content, Copy)):
        return False
    source = run.content.source
    return (
        content.source.file == source.file
        and content.source.offset == source.offset + run.size
        and run.size + target.size <= _COPY_BYTES
    )


def _collect(running: dict[Future[None], int]) -> int:
    """Wait for a piece, raise its error, and return the bytes of all that are done."""
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    size = 0
    for future in finished:
        size += running.pop(future)
        future.result()
    return size
