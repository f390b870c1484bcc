"""What a routing trace is on disk: a manifest, ``trace.json``, and compressed chunks of arrays.

Shape legend: T tokens, L MoE layers, E routed experts, K selected, H hidden, N sampled tokens.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.io import write_atomic
from moe_finetune.io.json_file import parse_json

MANIFEST = "trace.json"
MAX_EXPERTS, MAX_LAYERS = 1 << 15, 1_000  # ids are int16
FORMAT = "moe-finetune routing trace"
VERSION = 1

# Every field of a chunk, its shape in terms of the manifest, and the dtypes it may have.
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ids": (("T", "L", "K"), ("int16",)),
    "weights": (("T", "L", "K"), ("float16", "float32")),
    "seq": (("T",), ("int32", "int64")),
    "domain": (("T",), ("int16",)),
    "token_ids": (("T",), ("int32",)),
    "probs": (("T", "L", "E"), ("float16",)),
    "embedding_positions": (("N",), ("int64",)),
    "embedding_labels": (("N", "L"), ("int16",)),
    "embeddings": (("N", "L", "H"), ("float16", "float32")),
}
# What zipfile and numpy raise for damaged bytes; NotImplementedError and RuntimeError are a zip
# method and an encryption flag that nobody set.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
EMBEDDING_FIELDS = ("embedding_positions", "embedding_labels", "embeddings")


@dataclass(frozen=True)
class ChunkInfo:
    """One file of the trace: its name, the tokens and sampled embeddings in it, its size."""

    file: str
    tokens: int
    embeddings: int
    bytes: int


@dataclass(frozen=True)
class TraceInfo:
    """What the manifest says.

    Attributes:
        model_type: transformers' ``model_type`` of the traced model.
        checkpoint: the folder or hub id that was traced.
        layers: decoder layer of each MoE layer, in the order of the arrays.
        num_experts: routed experts E of a layer.
        top_k: experts K selected per token.
        hidden_size: H, or None when unknown.
        domains: names; the ``domain`` field contains their positions.
        fields: names of the arrays in every chunk (keys of ``FIELDS``).
        chunks: the files, in the order of the tokens.
    """

    model_type: str
    checkpoint: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int | None
    domains: tuple[str, ...]
    fields: tuple[str, ...]
    chunks: tuple[ChunkInfo, ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def sizes(self, chunk: ChunkInfo) -> dict[str, int | None]:
        """The size that each letter of ``FIELDS`` stands for in ``chunk``."""
        return {
            "T": chunk.tokens,
            "N": chunk.embeddings,
            "L": len(self.layers),
            "K": self.top_k,
            "E": self.num_experts,
            "H": self.hidden_size,
        }


def write_manifest(folder: Path, info: TraceInfo) -> None:
    """Write ``trace.json`` in one step, so that it is either absent or complete."""
    document = {"format": FORMAT, "version": VERSION, **asdict(info)}
    write_atomic(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> TraceInfo:
    """Read and check ``trace.json``; TraceError says what is wrong with it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise TraceError(
            f"{folder}: no {MANIFEST} there; the recording did not finish, or this is not a trace"
        )
    try:
        document = parse_json(path.read_bytes())
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise TraceError(
                f"{path}: got format {document.get('format')!r} version "
                f"{document.get('version')!r}, wanted {FORMAT!r} version {VERSION}"
            )
        info = TraceInfo(
            model_type=str(document["model_type"]),
            checkpoint=str(document["checkpoint"]),
            layers=tuple(int(layer) for layer in document["layers"]),
            num_experts=int(document["num_experts"]),
            top_k=int(document["top_k"]),
            hidden_size=None if document["hidden_size"] is None else int(document["hidden_size"]),
            domains=tuple(str(name) for name in document["domains"]),
            fields=tuple(str(name) for name in document["fields"]),
            chunks=tuple(_chunk_info(entry) for entry in document["chunks"]),
        )
    except TraceError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise TraceError(
            f"{path}: damaged ({type(error).__name__}: {error}); record again"
        ) from error
    _check_manifest(path, info)
    for chunk in info.chunks:
        file = folder / chunk.file
        if not file.is_file():
            raise TraceError(
                f"{file}: this chunk of the trace is missing; restore it or record again"
            )
        if file.stat().st_size != chunk.bytes:
            raise TraceError(
                f"{file}: damaged: {file.stat().st_size} bytes, {chunk.bytes} were written; "
                "restore it or record again"
            )
    return info


def _chunk_info(entry: Mapping[str, Any]) -> ChunkInfo:
    kinds = get_type_hints(ChunkInfo)
    return ChunkInfo(**{name: kind(entry[name]) for name, kind in kinds.items()})


def _check_manifest(path: Path, info: TraceInfo) -> None:
    unknown = sorted(set(info.fields) - set(FIELDS))
    ascending = all(a < b for a, b in zip(info.layers, info.layers[1:], strict=False))
    inside = all(Path(chunk.file).name == chunk.file for chunk in info.chunks)
    problem = (
        f"unknown fields {unknown}"
        if unknown
        else f"layers {list(info.layers)} are not ascending"
        if not (info.layers and ascending)
        else f"top_k {info.top_k} of {info.num_experts} experts"
        if not 1 <= info.top_k <= info.num_experts
        else f"{info.num_experts} experts or {len(info.layers)} layers, more than any model has"
        if info.num_experts > MAX_EXPERTS or len(info.layers) > MAX_LAYERS
        else "a negative number of tokens, embeddings or layers"
        if any(chunk.tokens < 0 or chunk.embeddings < 0 for chunk in info.chunks)
        or info.layers[0] < 0
        else "a domain, field or chunk is named twice"
        if any(
            len(set(names)) < len(names)
            for names in (info.domains, info.fields, [chunk.file for chunk in info.chunks])
        )
        else "a chunk lies outside the folder"
        if not inside
        else "it holds no tokens"
        if info.tokens < 1
        else None
    )
    if problem:
        raise TraceError(f"{path}: damaged: {problem}; record again")


def write_chunk(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a zip of ``.npy`` members (``numpy.load`` reads it), in one step.

    Fast deflate: numpy's own level 6 takes several times as long for a few percent.
    """
    temporary = path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                contiguous = np.ascontiguousarray(array)
                np.lib.format.write_array(member, contiguous, allow_pickle=False)
    temporary.replace(path)


def load_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file by name; TraceError when it is not one, or damaged."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                # Read whole, so that the checksum is verified before numpy parses anything.
                member = io.BytesIO(archive.read(f"{name}.npy"))
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    except UNREADABLE as error:
        raise TraceError(
            f"{path}: not a trace, or damaged ({type(error).__name__}: {error}); "
            "restore it or record again"
        ) from error
    return arrays


def read_chunk(
    path: Path, info: TraceInfo, chunk: ChunkInfo, fields: Iterable[str]
) -> dict[str, np.ndarray]:
    """Read and check some arrays of a chunk; TraceError names the file and the array."""
    arrays = load_arrays(path, fields)
    sizes = info.sizes(chunk)
    for name, array in arrays.items():
        letters, dtypes = FIELDS[name]
        shape = tuple(sizes[letter] for letter in letters)
        fits = array.ndim == len(shape) and all(
            size in (None, got) for size, got in zip(shape, array.shape, strict=True)
        )
        if not fits or array.dtype.name not in dtypes:
            raise TraceError(
                f"{path}: {name}: got {array.dtype} {array.shape}, wanted {' or '.join(dtypes)} "
                f"{shape}; the trace is damaged or of another model"
            )
        _check_values(path, name, array, info)
    return arrays


def _check_values(path: Path, name: str, array: np.ndarray, info: TraceInfo) -> None:
    if array.size == 0:
        return
    limits = {
        "ids": info.num_experts,
        "embedding_labels": info.num_experts,
        "domain": len(info.domains),
    }.get(name)
    if limits is not None and (array.min() < 0 or array.max() >= limits):
        raise TraceError(
            f"{path}: {name}: got values from {array.min()} to {array.max()}, wanted 0 to "
            f"{limits - 1}; the trace is damaged or of another model"
        )
    if name == "ids" and array.shape[-1] > 1:
        ordered = np.sort(array, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            token, layer = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(-1))[0][:2]
            raise TraceError(
                f"{path}: ids: token {token} has one expert twice in layer "
                f"{info.layers[layer]}; the trace is damaged, record again"
            )
    if name in ("weights", "probs") and array.min() < 0:
        raise TraceError(f"{path}: {name}: holds negative values; record again")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise TraceError(f"{path}: {name}: holds NaN or infinite values; record again")
