"""The safetensors container, read and written as bytes.

A file is an 8-byte little-endian length, a JSON header that maps each tensor's name to its dtype,
shape and byte range, and the data. Because headers are enough, a checkpoint of any size is checked
in milliseconds, and because offsets are known in advance, several threads can write one file.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.json_file import parse_json

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")


@dataclass(frozen=True)
class TensorInfo:
    """Where one stored tensor lies: ``size`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """The tensors of one file in the order of their data, and the bytes before the data."""

    file: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes

    @property
    def data_bytes(self) -> int:
        return sum(info.size for info in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        return len(self.raw) + self.data_bytes


def read_header(file: Path, error: type[MoeFinetuneError]) -> Header:
    """Read the header of ``file``, which safetensors checks; any defect raises ``error``."""
    try:
        with safe_open(file, "np"):
            pass
        with file.open("rb") as stream:
            prefix = stream.read(8)
            text = stream.read(int.from_bytes(prefix, "little"))
        entries = parse_json(text)
        metadata = entries.pop("__metadata__", {})
        start = len(prefix) + len(text)
        tensors = {name: _info(file, name, entry, start) for name, entry in entries.items()}
    except OSError as problem:
        reason = problem.strerror or problem
        raise error(f"{file}: cannot be read ({reason})") from problem
    except (SafetensorError, ValueError) as problem:
        raise error(
            f"{file}: truncated or corrupt ({problem}); copy or download this file again"
        ) from problem
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    return Header(file, tensors, metadata, prefix + text)


def _info(file: Path, name: str, entry: Mapping, start: int) -> TensorInfo:
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"'{name}' has dtype {entry['dtype']}, which is not supported here")
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return TensorInfo(name, file, entry["dtype"], shape, start + begin, end - begin)


def build_header(
    file: Path,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> Header:
    """Lay out tensors ``(name, dtype, shape)`` consecutively and encode the header for ``file``.

    The data start at a multiple of 8, as the format requires.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    spans: list[tuple[str, str, tuple[int, ...], int, int]] = []
    end = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        spans.append((name, dtype, shape, end, size))
        end += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    infos = {
        name: TensorInfo(name, file, dtype, shape, len(raw) + begin, size)
        for name, dtype, shape, begin, size in spans
    }
    return Header(file, infos, dict(entries["__metadata__"]), raw)  # type: ignore[call-overload]
