"""Stored bytes to torch tensors and back, with plain reads.

Files are read with ``preadv`` into buffers of our own: pages of a memory map would count as this
process's memory for as long as the kernel likes.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.weights.headers import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset`` of ``fd``; a short file is an OSError."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(f"unexpected end of file at byte {offset + done}")
        done += count


def write_from(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of ``buffer`` at ``offset`` of ``fd``."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(fd, buffer[done:], offset + done)


def read_bytes(file: Path, offset: int, size: int) -> bytearray:
    """``size`` bytes of ``file`` from ``offset``."""
    buffer = bytearray(size)
    fd = os.open(file, os.O_RDONLY)
    try:
        read_into(fd, memoryview(buffer), offset)
    finally:
        os.close(fd)
    return buffer


def read_tensor(info: TensorInfo) -> Tensor:
    """The stored tensor in its own dtype and shape."""
    if info.size == 0:
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    raw = read_bytes(info.file, info.offset, info.size)
    return torch.frombuffer(raw, dtype=DTYPES[info.dtype]).view(info.shape)
