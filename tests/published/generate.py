"""A folder as published: the config, true safetensors headers, and data that take no disk."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from moe_finetune.io.checkpoint_files import INDEX, SINGLE, index_text
from moe_finetune.io.safetensors_header import TensorInfo, build_header
from tests.published.fixture import Published, Row, expand


def write(published: Published, folder: Path) -> Path:
    """Write ``published`` into ``folder``; its tensors read as zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published.config, indent=2))
    tensors: list[TensorInfo] = []
    files = list(expand(published.files))
    for file, rows in zip(files, _shards(published, len(files)), strict=True):
        tensors += write_file(folder / file, rows)
    if files != [SINGLE]:
        (folder / INDEX).write_text(index_text(tensors))
    return folder


def write_file(file: Path, tensors: Iterable[tuple[str, Row]]) -> list[TensorInfo]:
    """One weight file: its header, the few values that rows state, and a hole up to its end."""
    rows = dict(tensors)
    header = build_header(file, [(name, row.dtype, row.shape) for name, row in rows.items()])
    with file.open("wb") as stream:
        stream.write(header.raw)
        for name, row in rows.items():
            if row.values is not None:
                stream.seek(header.tensors[name].offset)
                stream.write(struct.pack(f"<{len(row.values)}{_LETTER[row.dtype]}", *row.values))
        stream.truncate(header.file_bytes)
    return list(header.tensors.values())


_LETTER = {"I32": "i", "I64": "q"}


def _shards(published: Published, files: int) -> Iterable[list[tuple[str, Row]]]:
    """The tensors in files of about one size."""
    each = published.bytes / files
    shard: list[tuple[str, Row]] = []
    filled, number = 0, 1
    for name, row in published.tensors:
        shard.append((name, row))
        filled += row.bytes // len(row.expanded)
        if filled >= each * number and number < files:
            yield shard
            shard, number = [], number + 1
    yield shard
    yield from ([] for _ in range(number, files))
