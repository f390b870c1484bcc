"""Read stored numbers as a stream, to check that they are finite and to fingerprint checkpoints."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from moe_finetune.checkpoint.tensors import as_bytes, stored_parts, typed
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.safetensors_header import FLOATS, TensorInfo
from moe_finetune.io.terminal import terminal

DAMAGED = "copy or download the checkpoint again"
# Fingerprints: a checkpoint up to this size is read whole; of larger ones, parts of every tensor.
_WHOLE_BYTES = 256 << 20
_PARTS, _PART_BYTES = 4, 16 << 10
# Files (path, size, time of change) whose values this process has found finite.
_known_finite: set[tuple[str, int, int]] = set()
_known_prints: dict[frozenset[tuple[str, int, int]], str] = {}


def finite(values: Tensor) -> bool:
    """Return whether all values of a float tensor are finite."""
    if values.numel() == 0:
        return True
    least, largest = values.aminmax()
    return math.isfinite(least.item()) and math.isfinite(largest.item())


def not_finite(file: Path, name: str, remedy: str = DAMAGED) -> str:
    """The error message for a tensor that is not finite."""
    return f"{file}: '{name}' contains NaN or infinity; {remedy}"


def check_values(
    tensors: Iterable[TensorInfo], error: type[MoeFinetuneError], remedy: str = DAMAGED
) -> None:
    """Read every float tensor once, at the speed of the disk.

    Files that this process has already checked, and that have not changed, are skipped.

    Raises:
        error: names the file and the first tensor that contains NaN or infinity.
    """
    chosen = [info for info in tensors if info.dtype in FLOATS]
    files = {info.file for info in chosen}
    stamps = {file: _stamp(file) for file in files}
    chosen = [info for info in chosen if stamps[info.file] not in _known_finite]
    size, read = sum(info.size for info in chosen), 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for info, good in zip(chosen, pool.map(all_finite, chosen), strict=True):
            read += info.size
            terminal().progress(read, size, "reading the weights")
            if not good:
                pool.shutdown(cancel_futures=True)
                raise error(not_finite(info.file, info.name, remedy))
    _known_finite.update(stamps.values())


def all_finite(info: TensorInfo) -> bool:
    """Return whether a stored float tensor contains neither NaN nor infinity."""
    return all(finite(typed(part, info.dtype)) for part in stored_parts(info, "values"))


def fingerprint(tensors: Iterable[TensorInfo]) -> str:
    """SHA-256 over names, dtypes, shapes and contents of a checkpoint's tensors.

    Copies have the same fingerprint however they are split into files. Above 256 MiB only four
    parts of 16 KiB of each tensor are hashed, which takes a second and still distinguishes trained
    checkpoints.
    """
    infos = sorted(tensors, key=lambda info: info.name)
    files = frozenset(map(_stamp, {info.file for info in infos}))
    if files not in _known_prints:
        _known_prints[files] = _fingerprint(infos)
    return _known_prints[files]


def _fingerprint(infos: list[TensorInfo]) -> str:
    read_whole = sum(info.size for info in infos) <= _WHOLE_BYTES
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda info: digest(info, read_whole).digest(), infos))
    over_all = hashlib.sha256()
    for info, part in zip(infos, parts, strict=True):
        over_all.update(f"{info.name}\0{info.dtype}\0{list(info.shape)}\0".encode() + part)
    return over_all.hexdigest()


def _stamp(file: Path) -> tuple[str, int, int]:
    state = file.stat()
    return str(file.resolve()), state.st_size, state.st_mtime_ns


def digest(info: TensorInfo, read_whole: bool = True) -> hashlib._Hash:
    """SHA-256 of a stored tensor's bytes, or of four parts of 16 KiB of them."""
    parts = stored_parts(info, "values")
    if not read_whole and info.size > _PARTS * _PART_BYTES:
        last = info.size - _PART_BYTES
        starts = [last * part // (_PARTS - 1) for part in range(_PARTS)]
        parts = stored_parts(info, "values", starts, _PART_BYTES)
    over = hashlib.sha256()
    for part in parts:
        over.update(as_bytes(part))
    return over
