"""The format of a trace on disk: a manifest, ``trace.json``, and compressed chunks of arrays.

Shape legend: T tokens, L MoE layers, E routed experts, K selected, H hidden, N sampled tokens.
"""

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_finetune.errors import TraceError
from moe_finetune.io import write_atomic
from moe_finetune.io.json_file import parse_json

MANIFEST = "trace.json"
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
EMBEDDING_FIELDS = ("embedding_positions", "embedding_labels", "embeddings")


class ChunkInfo(BaseModel):
    """One file of the trace: its name, the tokens and sampled embeddings in it, its size."""

    model_config = ConfigDict(frozen=True)

    file: str = Field(pattern=r"^[^/\\]+$")
    tokens: int = Field(ge=1)
    embeddings: int = Field(ge=0)
    bytes: int


class TraceInfo(BaseModel):
    """The content of the manifest.

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

    model_config = ConfigDict(frozen=True)

    model_type: str
    checkpoint: str
    layers: tuple[int, ...] = Field(min_length=1, max_length=1000)
    num_experts: int = Field(ge=1, lt=1 << 15)  # ids are int16
    top_k: int = Field(ge=1)
    hidden_size: int | None
    domains: tuple[str, ...] = Field(min_length=1)
    fields: tuple[str, ...] = ()
    chunks: tuple[ChunkInfo, ...] = ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        unknown = sorted(set(self.fields) - set(FIELDS))
        if unknown:
            raise ValueError(f"unknown fields {unknown}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} of {self.num_experts} experts")
        if self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)} are not ascending")
        files = tuple(chunk.file for chunk in self.chunks)
        for key, names in (("domains", self.domains), ("fields", self.fields), ("chunks", files)):
            if len(set(names)) < len(names):
                raise ValueError(f"{key}: one is named twice")
        return self

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
    document = {"format": FORMAT, "version": VERSION, **info.model_dump()}
    write_atomic(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> TraceInfo:
    """Read and check ``trace.json``; TraceError says what is wrong with it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise TraceError(
            f"{folder}: no {MANIFEST} found; the recording did not finish, or this is not a trace"
        )
    try:
        document = parse_json(path.read_bytes())
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise TraceError(
                f"{path}: got format {document.get('format')!r} version "
                f"{document.get('version')!r}, expected {FORMAT!r} version {VERSION}"
            )
        info = TraceInfo.model_validate(document)
    except TraceError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        problem = f"{where} {first['msg'].removeprefix('Value error, ')}".strip()
        raise TraceError(f"{path}: damaged: {problem}; record again") from error
    except (OSError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{path}: damaged ({type(error).__name__}: {error}); record again"
        ) from error
    if not info.chunks:
        raise TraceError(f"{path}: damaged: it contains no tokens; record again")
    for chunk in info.chunks:
        file = folder / chunk.file
        if not file.is_file():
            raise TraceError(
                f"{file}: this chunk of the trace is missing; restore it or record again"
            )
        if file.stat().st_size != chunk.bytes:
            raise TraceError(
                f"{file}: damaged: {file.stat().st_size} bytes instead of {chunk.bytes}; restore "
                "it or record again"
            )
    return info


def write_chunk(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a zip of ``.npy`` members (``numpy.load`` reads it), in one step.

    Fast deflate: numpy's level 6 takes several times as long to save a few percent.
    """
    temporary = path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                contiguous = np.ascontiguousarray(array)
                np.lib.format.write_array(member, contiguous, allow_pickle=False)
    temporary.replace(path)


def load_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file by name; TraceError if it is not one or is damaged."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                # Read whole, so that the checksum is verified before numpy parses anything.
                member = io.BytesIO(archive.read(f"{name}.npy"))
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    except Exception as error:  # zipfile, zlib and numpy raise many types for damaged bytes
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
                f"{path}: {name}: got {array.dtype} {array.shape}, expected {' or '.join(dtypes)} "
                f"{shape}; the trace is damaged or from another model"
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
            f"{path}: {name}: got values from {array.min()} to {array.max()}, expected 0 to "
            f"{limits - 1}; the trace is damaged or from another model"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise TraceError(f"{path}: {name}: contains NaN or infinite values; record again")
