"""The bytes of weight files: read and check stored tensors, and write a checkpoint's folder.

Files are read with ``pread``, because pages of a memory map count as this process's memory until
the kernel drops them. Offsets are known from the headers, so that threads write in any order.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.errors import CheckpointError, MoeFinetuneError
from moe_finetune.io import output_folder, sync, write_small
from moe_finetune.io.safetensors_header import FLOATS, ITEM_BYTES, Header, TensorInfo
from moe_finetune.io.terminal import terminal

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
DAMAGED = "copy or download the checkpoint again"
_CHUNK_BYTES = 8 << 20
_THREADS = min(8, os.cpu_count() or 1)
# Fingerprints: a checkpoint up to this size is read whole; of larger ones, parts of every tensor.
_WHOLE_BYTES = 256 << 20
_PARTS = 4
_PART_BYTES = 16 << 10
_SLICE_BYTES = 4 << 10
# Files (path, size, time of change) whose values this process has found finite.
_known_finite: set[tuple[tuple[str, int, int], str]] = set()
_known_prints: dict[frozenset[tuple[str, int, int]], str] = {}

Content = Callable[[TensorInfo], Iterator[Tensor]]
"""Yields the bytes of an output tensor, in order, as contiguous tensors of any dtype."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Computed(TensorInfo):
    """A tensor that ``make`` computes from stored ones whenever it is read whole."""

    make: Callable[[], Tensor]


def computed(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Computed:
    """A tensor that ``make`` returns, of this type and shape."""
    return Computed(name, Path(), dtype, shape, 0, math.prod(shape) * ITEM_BYTES[dtype], make)


def in_memory(name: str, value: Tensor) -> Computed:
    """A tensor that no file has."""
    dtype = next(kind for kind, dtype in DTYPES.items() if dtype == value.dtype)
    return computed(name, dtype, tuple(value.shape), lambda: value)


def read_tensor(info: TensorInfo, expert: int | None = None) -> Tensor:
    """A stored tensor in its own dtype, or one entry of its first dimension, such as an expert."""
    if isinstance(info, Computed):
        return info.make()
    shape = info.shape if expert is None else info.shape[1:]
    return read_elements(info, (expert or 0) * math.prod(shape), math.prod(shape)).view(shape)


def read_elements(info: TensorInfo, first: int, count: int) -> Tensor:
    """``count`` elements of a stored tensor from the one with index ``first``, flat."""
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{info.file}: '{info.name}' is stored as {info.dtype}")
    item = ITEM_BYTES[info.dtype]
    return _read(info, first * item, count * item).view(DTYPES[info.dtype])


def _read(info: TensorInfo, start: int, size: int) -> Tensor:
    """``size`` bytes of a stored tensor from byte ``start``."""
    buffer = torch.empty(size, dtype=torch.uint8)
    view, done = as_bytes(buffer), 0
    fd = os.open(info.file, os.O_RDONLY)
    try:
        while done < size:
            count = os.preadv(fd, [view[done:]], info.offset + start + done)
            if count == 0:
                raise OSError(f"{info.file}: unexpected end of file in '{info.name}'")
            done += count
    finally:
        os.close(fd)
    return buffer


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _chunks(info: TensorInfo) -> Iterator[Tensor]:
    for first in range(0, info.size, _CHUNK_BYTES):
        yield _read(info, first, min(_CHUNK_BYTES, info.size - first))


def finite(values: Tensor) -> bool:
    """Return whether all values of a float tensor are finite."""
    if values.numel() == 0:
        return True
    least, largest = values.aminmax()
    return math.isfinite(least.item()) and math.isfinite(largest.item())


def all_finite(info: TensorInfo) -> bool:
    """Return whether a stored float tensor contains neither NaN nor infinity."""
    return all(finite(chunk.view(DTYPES[info.dtype])) for chunk in _chunks(info))


def not_finite(file: Path, name: str, remedy: str = DAMAGED) -> str:
    """The error message for a tensor that is not finite."""
    return f"{file}: '{name}' contains NaN or infinity; {remedy}"


def check_values(
    tensors: Iterable[TensorInfo], error: type[MoeFinetuneError], remedy: str = DAMAGED
) -> None:
    """Read every float tensor once, at the speed of the disk.

    What this process has already checked, in files that have not changed, is skipped.
    """
    chosen = [info for info in tensors if info.dtype in FLOATS]
    stamps = {file: _stamp(file) for file in {info.file for info in chosen}}
    chosen = [info for info in chosen if (stamps[info.file], info.name) not in _known_finite]
    size, read = sum(info.size for info in chosen), 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for info, good in zip(chosen, pool.map(all_finite, chosen), strict=True):
            read += info.size
            terminal().progress(read, size, "reading the weights")
            if not good:
                pool.shutdown(cancel_futures=True)
                raise error(not_finite(info.file, info.name, remedy))
    _known_finite.update((stamps[info.file], info.name) for info in chosen)


def fingerprint(tensors: Iterable[TensorInfo]) -> str:
    """SHA-256 over names, dtypes, shapes and contents of a checkpoint's tensors.

    Copies have the same fingerprint however they are split into files. Above 256 MiB only four
    parts of 16 KiB of each tensor are hashed, which takes a second and still distinguishes trained
    checkpoints.
    """
    infos = sorted(tensors, key=lambda info: info.name)
    files = frozenset(map(_stamp, {info.file for info in infos}))
    if files in _known_prints:
        return _known_prints[files]
    read_whole = sum(info.size for info in infos) <= _WHOLE_BYTES
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(lambda info: digest(info, read_whole), infos))
    over_all = hashlib.sha256()
    for info, part in zip(infos, parts, strict=True):
        over_all.update(f"{info.name}\0{info.dtype}\0{list(info.shape)}\0".encode() + part)
    _known_prints[files] = over_all.hexdigest()
    return _known_prints[files]


def _stamp(file: Path) -> tuple[str, int, int]:
    state = file.stat()
    return str(file.resolve()), state.st_size, state.st_mtime_ns


def digest(info: TensorInfo, read_whole: bool = True) -> bytes:
    """SHA-256 of a stored tensor's bytes, or of four parts of 16 KiB of them."""
    parts = _chunks(info)
    if not read_whole and info.size > _PARTS * _PART_BYTES:
        last = info.size - _PART_BYTES
        starts = [last * part // (_PARTS - 1) for part in range(_PARTS)]
        parts = (_read(info, start, _PART_BYTES) for start in starts)
    over = hashlib.sha256()
    for part in parts:
        over.update(as_bytes(part))
    return over.digest()


def read_slice_middles(info: TensorInfo) -> list[memoryview]:
    """Up to 4 KiB from the middle of each entry of a tensor's first dimension."""
    size = info.size // info.shape[0]
    count = min(size, _SLICE_BYTES)
    starts = [entry * size + (size - count) // 2 for entry in range(info.shape[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [as_bytes(part) for part in pool.map(lambda s: _read(info, s, count), starts)]


def copy_of(source: TensorInfo) -> Content:
    """The stored bytes of ``source``, unchanged; refuses NaN and infinity."""

    def chunks(_target: TensorInfo) -> Iterator[Tensor]:
        for chunk in _chunks(source):
            if source.dtype in FLOATS and not finite(chunk.view(DTYPES[source.dtype])):
                raise CheckpointError(not_finite(source.file, source.name))
            yield chunk

    return chunks


def constant(value: Tensor) -> Content:
    """A tensor in memory."""
    return lambda _target: iter([value])


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

    ``progress`` is called with (bytes done, total bytes) after each tensor, in the calling thread.
    """
    total = sum(header.data_bytes for header in files.values())
    size = sum(header.file_bytes for header in files.values()) + sum(map(len, small.values()))
    done, threads = 0, workers or _THREADS + 2
    with output_folder(output, size, overwrite) as folder:
        for name, raw in small.items():
            write_small(folder, name, raw)
        with _one_thread_each(), ThreadPoolExecutor(threads) as pool:
            synced: list[Future[None]] = []
            try:
                for name, header in files.items():
                    _write_header(folder / name, header)
                    targets = [info for info in header.tensors.values() if info.size]
                    running = [
                        pool.submit(_write_tensor, folder / name, target, contents[target.name])
                        for target in targets
                    ]
                    for target, future in zip(targets, running, strict=True):
                        future.result()
                        done += target.size
                        if progress:
                            progress(done, total)
                    synced.append(pool.submit(sync, folder / name))
                for future in synced:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
    return size


def _write_header(file: Path, header: Header) -> None:
    with file.open("xb") as stream:
        stream.write(header.raw)
        stream.truncate(header.file_bytes)


def _write_tensor(file: Path, target: TensorInfo, content: Content) -> None:
    fd, offset = os.open(file, os.O_WRONLY), target.offset
    try:
        for chunk in content(target):
            raw, done = as_bytes(chunk), 0
            while done < len(raw):
                done += os.pwrite(fd, raw[done:], offset + done)
            offset += len(raw)
    finally:
        os.close(fd)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit torch to one thread per worker, and restore its threads afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
