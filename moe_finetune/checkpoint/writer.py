"""Write weight files from a plan with a few threads and bounded memory.

Every output tensor has a content: a copy of stored bytes, or an object that computes them. The
headers fix all offsets, so threads write in any order, and adjacent copies are joined. Where the
file system allows it, whole pages are written with direct I/O, which takes a tenth of the processor
time and evicts no other files from the page cache. A file is synced when its last piece is written.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_finetune.checkpoint.tensors import PAGE, as_bytes, read_into, thread_buffer, typed
from moe_finetune.checkpoint.values import finite, not_finite
from moe_finetune.errors import CheckpointError
from moe_finetune.io import output_folder, write_small
from moe_finetune.io.safetensors_header import FLOATS, ITEM_BYTES, Header, TensorInfo

_COPY_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20

Progress = Callable[[int, int], None]


class Content(Protocol):
    """Fills the bytes of one output tensor."""

    def write(self, out: Output, target: TensorInfo) -> None:
        """Write all of ``target.size`` bytes at ``target.offset`` of ``out``."""


@dataclass(frozen=True)
class Copy:
    """The stored bytes of ``source``, unchanged."""

    source: TensorInfo

    def write(self, out: Output, target: TensorInfo) -> None:
        copy_range(self.source.file, self.source.offset, out, target.offset, target.size)


@dataclass(frozen=True)
class Literal:
    """Bytes in memory."""

    content: bytes

    def write(self, out: Output, target: TensorInfo) -> None:
        out.write(torch.frombuffer(bytearray(self.content), dtype=torch.uint8), target.offset)


@dataclass(frozen=True)
class _Piece:
    """Adjacent tensors of one file that one thread writes together."""

    file: str
    targets: tuple[TensorInfo, ...]
    content: Content

    @property
    def size(self) -> int:
        return sum(target.size for target in self.targets)

    def write(self, out: Output) -> None:
        if isinstance(self.content, Copy):
            source, start = self.content.source, self.targets[0].offset
            copy_range(source.file, source.offset, out, start, self.size, self._check)
        else:
            self.content.write(out, self.targets[0])

    def _check(self, first: int, part: Tensor) -> None:
        """Refuse NaN and infinity in ``part``, the bytes from ``first`` of a joined copy."""
        begin = self.targets[0].offset + first
        for target in self.targets:
            start, end = max(target.offset - begin, 0), target.offset + target.size - begin
            if target.dtype not in FLOATS or end <= 0 or start >= len(part):
                continue
            raw = part[start:end]
            if (raw.data_ptr() - part.data_ptr() + part.storage_offset()) % 8:
                raw = raw.clone()  # a typed view must start at a multiple of the item size
            if not finite(typed(raw, target.dtype)):
                assert isinstance(self.content, Copy)
                raise CheckpointError(not_finite(self.content.source.file, target.name))


def write_checkpoint(
    output: Path,
    files: Mapping[str, Header],
    contents: Mapping[str, Content],
    small: Mapping[str, bytes],
    overwrite: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
) -> int:
    """Write a checkpoint folder, which appears whole or not at all, and return its size in bytes.

    Args:
        small: the other files, by name.
    """
    size = sum(header.file_bytes for header in files.values()) + sum(map(len, small.values()))
    with output_folder(output, size, overwrite) as folder:
        for name, raw in small.items():
            write_small(folder, name, raw)
        write_files(folder, files, contents, workers or default_workers(), progress)
    return size


def default_workers() -> int:
    """One thread for each core this process may use, at most 8, plus two that wait for the disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, cores or 1) + 2


def write_files(
    folder: Path,
    files: Mapping[str, Header],
    contents: Mapping[str, Content],
    workers: int,
    progress: Progress | None = None,
) -> None:
    """Write ``files`` into ``folder``, with the tensors' bytes from ``contents``.

    Args:
        files: file name -> header, whose offsets place each tensor.
        contents: tensor name -> content.
        workers: threads; at most twice as many pieces are in flight.
        progress: called with (bytes done, total bytes) after each piece, in the calling thread.
    """
    total = sum(header.data_bytes for header in files.values())
    done = 0
    outputs: list[Output] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        running: dict[Future[None], int] = {}
        try:
            for piece, out in _pieces(folder, files, contents, outputs):
                running[pool.submit(out.write_piece, piece)] = piece.size
                if len(running) >= 2 * workers:
                    done += _collect(running)
                    if progress:
                        progress(done, total)
            while running:
                done += _collect(running)
                if progress:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
            for out in outputs:
                out.close()


def copy_range(
    file: Path,
    start: int,
    out: Output,
    at: int,
    size: int,
    check: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Copy ``size`` bytes of ``file`` from ``start`` to ``at`` of ``out``, a few MB at a time.

    ``check`` gets each part and the index of its first byte before it is written.
    """
    source = os.open(file, os.O_RDONLY)
    try:
        for done in range(0, size, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, size - done)
            buffer = thread_buffer("copy", count, at + done)
            read_into(source, as_bytes(buffer), start + done)
            if check is not None:
                check(done, buffer)
            out.write(buffer, at + done)
    finally:
        os.close(source)


class Output:
    """One file being written by several threads; syncs and closes itself after its last byte."""

    def __init__(self, path: Path, header: Header):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct = -1
        with suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._left = header.data_bytes
        self._lock = threading.Lock()
        _write(self._fd, memoryview(header.raw), 0)
        os.ftruncate(self._fd, header.file_bytes)
        if not self._left:
            self._finish()

    def write(self, data: Tensor, offset: int) -> None:
        """Write uint8 ``data`` at ``offset``: whole pages directly, the edges buffered."""
        raw, head = as_bytes(data), -offset % PAGE
        body = max(0, (len(raw) - head) // PAGE * PAGE)
        if self._direct < 0 or not body or (data.data_ptr() - offset) % PAGE:
            _write(self._fd, raw, offset)
            return
        _write(self._fd, raw[:head], offset)
        try:
            _write(self._direct, raw[head : head + body], offset + head)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            # This device needs multiples larger than a page.
            _write(self._fd, raw[head : head + body], offset + head)
        _write(self._fd, raw[head + body :], offset + head + body)

    def write_piece(self, piece: _Piece) -> None:
        """Write one piece; after the last one, sync and close the file."""
        piece.write(self)
        with self._lock:
            self._left -= piece.size
            last = self._left == 0
        if last:
            self._finish()

    def close(self) -> None:
        for fd in {self._fd, self._direct} - {-1}:
            os.close(fd)
        self._fd = self._direct = -1

    def _finish(self) -> None:
        os.fsync(self._fd)
        self.close()


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _pieces(
    folder: Path,
    files: Mapping[str, Header],
    contents: Mapping[str, Content],
    outputs: list[Output],
) -> Iterator[tuple[_Piece, Output]]:
    for name, header in files.items():
        out = Output(folder / name, header)
        outputs.append(out)
        for piece in _joined(name, header, contents):
            yield piece, out


def _joined(name: str, header: Header, contents: Mapping[str, Content]) -> Iterator[_Piece]:
    """One piece per tensor; adjacent copies of adjacent bytes are joined up to a limit."""
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
        # so that in each part read, every tensor's items begin at a multiple of their size
        and run.size % ITEM_BYTES[target.dtype] == 0
    )


def _collect(running: dict[Future[None], int]) -> int:
    """Wait for a piece, raise its error if any, and return the bytes of all finished pieces."""
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    size = 0
    for future in finished:
        size += running.pop(future)
        future.result()
    return size
