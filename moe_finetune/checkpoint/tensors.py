"""Read stored bytes into torch tensors, with plain reads into buffers that each thread keeps.

Files are read with ``preadv``, because pages of a memory map count as this process's memory until
the kernel drops them. Buffers are reused because allocating memory takes longer than the arithmetic
on it.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.io.safetensors_header import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}

# Direct I/O needs offsets, lengths and addresses that are multiples of this.
PAGE = 4096
_CHUNK_BYTES = 8 << 20
_held = threading.local()


def thread_buffer(name: str, size: int, offset: int = 0) -> Tensor:
    """``size`` uninitialized bytes that this thread keeps under ``name``.

    Their address and the file offset ``offset`` differ by a multiple of a page, so that direct I/O
    can write them there. The next call with the same name may return the same bytes.
    """
    buffer: Tensor | None = getattr(_held, name, None)
    if buffer is None or len(buffer) < size + PAGE:
        buffer = torch.empty(size + PAGE, dtype=torch.uint8)
        setattr(_held, name, buffer)
    start = (offset - buffer.data_ptr()) % PAGE
    return buffer[start : start + size]


def typed(raw: Tensor, dtype: str) -> Tensor:
    """Bytes as a flat tensor of a stored dtype; ``raw`` must be aligned to its item size."""
    return raw.view(DTYPES[dtype])


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset`` of ``fd``; raise OSError if the file is too short."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(f"unexpected end of file at byte {offset + done}")
        done += count


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data


def read_bytes(file: Path, offset: int, size: int) -> Tensor:
    """``size`` bytes of ``file`` from ``offset`` as a uint8 tensor."""
    buffer = torch.empty(size, dtype=torch.uint8)
    fd = os.open(file, os.O_RDONLY)
    try:
        read_into(fd, as_bytes(buffer), offset)
    finally:
        os.close(fd)
    return buffer


def stored_parts(
    info: TensorInfo, name: str, starts: Iterable[int] | None = None, size: int = _CHUNK_BYTES
) -> Iterator[Tensor]:
    """Yield the bytes of a stored tensor part by part, in this thread's buffer ``name``.

    Args:
        name: see :func:`thread_buffer`; a part is overwritten by the next one.
        starts: first byte of each part; by default parts are consecutive.
        size: bytes in a part; the last may be shorter.
    """
    fd = os.open(info.file, os.O_RDONLY)
    try:
        for first in range(0, info.size, size) if starts is None else starts:
            part = thread_buffer(name, min(size, info.size - first))
            read_into(fd, as_bytes(part), info.offset + first)
            yield part
    finally:
        os.close(fd)


def read_tensor(info: TensorInfo) -> Tensor:
    """The stored tensor in its own dtype and shape."""
    return typed(read_bytes(info.file, info.offset, info.size), info.dtype).view(info.shape)
