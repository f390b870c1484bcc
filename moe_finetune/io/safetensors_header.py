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

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.json_file import parse_json

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
# The format's own limit; a larger length means that the file is something else.
_MAX_HEADER = 100_000_000


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
    """Read and check the header of ``file``; any defect raises ``error`` with its name."""

    def broken(problem: str) -> MoeFinetuneError:
        return error(f"{file}: {problem}; copy or download this file again")

    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise broken(f"truncated; {total} bytes are fewer than a safetensors header needs")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER:
                raise broken("corrupt; not a safetensors file")
            text = stream.read(length)
    except OSError as problem:
        raise error(f"{file}: cannot be read ({problem.strerror})") from problem
    if len(text) < length:
        raise broken(f"truncated inside its header, {total} of {8 + length} bytes")
    try:
        entries = parse_json(text)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ contains values that are not text")
        start = 8 + length
        tensors = {name: _entry(file, name, entry, start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise broken(f"corrupt header ({problem})") from problem
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    end = start
    for info in tensors.values():
        if info.offset != end:
            raise broken(f"corrupt header, the data of '{info.name}' overlaps or leaves a hole")
        end += info.size
    if total < end:
        raise broken(f"truncated, {total} of {end} bytes")
    if total > end:
        raise broken(f"corrupt, {total - end} bytes follow the last tensor")
    return Header(file, tensors, metadata, prefix + text)


def _entry(file: Path, name: str, entry: Mapping, start: int) -> TensorInfo:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(value) is int for value in (*shape, begin, end)):
        raise ValueError(f"'{name}' has a shape or an offset that is not a whole number")
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"'{name}' has the unknown dtype {entry['dtype']}")
    expected = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
    if min((begin, *shape)) < 0 or end - begin != expected:
        raise ValueError(f"'{name}' has {end - begin} bytes, its shape {list(shape)} {expected}")
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
