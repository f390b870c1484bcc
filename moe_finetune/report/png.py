"""A picture of a matrix as a tiny palette PNG: 48 layers x 128 experts take about 5 kB."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from moe_finetune.report.colors import Rgba


def indexed_png(levels_RC: np.ndarray, palette: list[Rgba]) -> bytes:
    """Return a PNG of one pixel per cell.

    Args:
        levels_RC: uint8 indices into ``palette``, one per cell.
        palette: at most 256 colours with alpha.
    """
    rows, columns = levels_RC.shape
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    filtered = np.zeros((rows, columns + 1), np.uint8)  # the first byte of a row: no filter
    filtered[:, 1:] = levels_RC
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", bytes(channel for color in palette for channel in color[:3])),
            _chunk(b"tRNS", bytes(color[3] for color in palette)),
            _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def data_uri(png: bytes) -> str:
    """Return the PNG as an address that needs no file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
