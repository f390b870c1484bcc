"""Routing traces: which experts every token was sent to, on disk.

A trace is a folder of safetensors parts and ``trace.json``, which names them with their checksums.
It is written last, so a broken recording has none. The ``.npz`` files in which the routing of
DeepSeek-V2-Lite was published by the ESFT authors open too.

N are sampled tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load

from moe_finetune.errors import TraceError
from moe_finetune.io.json_file import parse_json

MANIFEST = "trace.json"
FORMAT, VERSION = "moe-finetune routing trace", 2
PUBLISHED = ("ids", "weights", "seq")
DEEPSEEK_V2_LITE_EXPERTS = 64

# Every field, its shape, and the dtypes it may have.
FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ids": ("TLK", ("int16",)),
    "weights": ("TLK", ("float16", "float32")),
    "norms": ("TLK", ("float32",)),
    "seq": ("T", ("int32", "int64")),
    "domain": ("T", ("int16",)),
    "token_ids": ("T", ("int32",)),
    "probs": ("TLE", ("float16",)),
    "embedding_labels": ("NL", ("int16",)),
    "embeddings": ("NLH", ("float16", "float32")),
}


class Part(BaseModel):
    """One file of the trace, with the tokens and sampled embeddings in it."""

    model_config = ConfigDict(frozen=True)

    file: str = Field(pattern=r"^[^/\\]+$")
    tokens: int = Field(ge=1)
    embeddings: int = Field(ge=0)
    crc32: int


class TraceInfo(BaseModel):
    """What ``trace.json`` says of the traced model and the trace.

    Attributes:
        layers: decoder layer of each MoE layer, in the order of the arrays.
        hidden_size: H, or None when unknown.
        groups: of experts in a layer, and of which a token selects some; None if not recorded.
        domains: names; the ``domain`` field contains their positions.
        fields: names of the arrays in every part (keys of ``FIELDS``).
        parts: the files, in the order of the tokens.
    """

    model_config = ConfigDict(frozen=True)

    model_type: str
    checkpoint: str
    layers: tuple[int, ...] = Field(min_length=1, max_length=1000)
    num_experts: int = Field(ge=1, lt=1 << 15)  # ids are int16
    top_k: int = Field(ge=1)
    hidden_size: int | None
    groups: tuple[int, int] | None = None
    domains: tuple[str, ...] = Field(min_length=1)
    fields: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        unknown = sorted(set(self.fields) - set(FIELDS))
        if unknown:
            raise ValueError(f"unknown fields {unknown}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} of {self.num_experts} experts")
        if self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)} are not ascending")
        files = tuple(part.file for part in self.parts)
        for key, names in (("domains", self.domains), ("fields", self.fields), ("parts", files)):
            if len(set(names)) < len(names):
                raise ValueError(f"{key}: one is named twice")
        return self

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True)
class TraceChunk:
    """Consecutive tokens of a trace, the first of which is number ``start``: ``chunk["ids"]``."""

    start: int
    tokens: int
    arrays: Mapping[str, np.ndarray]

    def __getitem__(self, field: str) -> np.ndarray:
        return self.arrays[field]


class RoutingTrace:
    """A trace on disk, of which arrays are read part by part."""

    def __init__(self, path: Path, info: TraceInfo):
        self.path, self.info = path, info

    @classmethod
    def open(cls, path: str | Path) -> RoutingTrace:
        """Open a trace folder, or an ``.npz`` of the published DeepSeek-V2-Lite layout.

        That has ``ids`` int16 ``(T, L, K)``, ``weights`` float32 of the same shape and ``seq``
        ``(T,)``. TraceError says what is wrong.
        """
        path = Path(path)
        if path.is_dir():
            return cls(path, _read_manifest(path))
        if path.is_file():
            return cls(path, _published(path))
        raise TraceError(f"{path}: no trace found; give a trace folder or an .npz file")

    def check(
        self,
        *,
        model_type: str | None = None,
        layers: Sequence[int] | None = None,
        num_experts: int | None = None,
    ) -> None:
        """Raise TraceError unless the trace fits a model with these facts (None: any)."""
        for what, recorded, expected in (
            ("model type", self.info.model_type, model_type),
            ("MoE layers", list(self.info.layers), layers if layers is None else list(layers)),
            ("experts a layer", self.info.num_experts, num_experts),
        ):
            if expected is not None and recorded != expected:
                raise TraceError(
                    f"{self.path}: recorded with {what} {recorded}, expected {expected}; record a "
                    "trace of this model with 'moe-finetune analyze'"
                )

    @property
    def num_tokens(self) -> int:
        return self.info.tokens

    @property
    def num_embeddings(self) -> int:
        return sum(part.embeddings for part in self.info.parts)

    def has(self, field: str) -> bool:
        """Whether the trace has ``field`` (a key of ``FIELDS``)."""
        return field in self.info.fields

    def chunks(self, *fields: str) -> Iterator[TraceChunk]:
        """Yield the trace part by part with the arrays of ``fields`` (default ids, weights)."""
        names = fields or ("ids", "weights")
        self._require(names)
        start = 0
        for part in self.info.parts:
            yield TraceChunk(start, part.tokens, self._arrays(part, names))
            start += part.tokens

    def load(self, field: str, domain: str | None = None) -> np.ndarray:
        """One field of the whole trace, or of the tokens of one domain, in their order."""
        self._require((field,))
        if domain is None:
            return np.concatenate([chunk[field] for chunk in self.chunks(field)])
        if domain not in self.info.domains:
            raise TraceError(
                f"{self.path}: no domain '{domain}'; it contains {', '.join(self.info.domains)}"
            )
        index = self.info.domains.index(domain)
        parts = [chunk[field][chunk["domain"] == index] for chunk in self.chunks(field, "domain")]
        values = np.concatenate(parts)
        if not len(values):
            raise TraceError(f"{self.path}: domain '{domain}' has no tokens; record it again")
        return values

    def _require(self, names: Sequence[str]) -> None:
        for name in names:
            if not self.has(name):
                raise TraceError(
                    f"{self.path}: contains no {name}, only {', '.join(self.info.fields)}; "
                    "record it again with that option"
                )

    def _arrays(self, part: Part, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        if self.path.is_dir():
            path = self.path / part.file
            try:
                content = path.read_bytes()
                if zlib.crc32(content) != part.crc32:
                    raise TraceError(f"{path}: damaged; restore it or record again")
                arrays = {name: array for name, array in load(content).items() if name in names}
            except FileNotFoundError as error:
                raise TraceError(
                    f"{path}: this part of the trace is missing; restore it or record again"
                ) from error
            except (OSError, SafetensorError, ValueError) as error:
                raise TraceError(f"{path}: damaged ({error}); record again") from error
        else:
            path = self.path
            arrays = _npz(path, [name for name in names if name in PUBLISHED])
            if "domain" in names:
                arrays["domain"] = np.zeros(part.tokens, np.int16)
        for name in names:
            self._check(path, name, arrays.get(name), part)
        if "ids" in arrays and not self.path.is_dir():
            self._refuse_repeated(arrays["ids"])
        return arrays

    def _check(self, path: Path, name: str, array: np.ndarray | None, part: Part) -> None:
        info = self.info
        sizes = {"T": part.tokens, "N": part.embeddings, "L": len(info.layers), "K": info.top_k,
                 "E": info.num_experts, "H": info.hidden_size}  # fmt: skip
        letters, dtypes = FIELDS[name]
        shape = tuple(sizes[letter] for letter in letters)
        if array is None or array.dtype.name not in dtypes or array.ndim != len(shape) or any(
            size not in (None, actual) for size, actual in zip(shape, array.shape, strict=True)
        ):  # fmt: skip
            stored = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise TraceError(
                f"{path}: {name}: got {stored}, expected {' or '.join(dtypes)} {shape}; the trace "
                "is damaged or from another model"
            )
        limits = {"ids": info.num_experts, "embedding_labels": info.num_experts,
                  "domain": len(info.domains)}  # fmt: skip
        if name in limits and array.size and not 0 <= array.min() <= array.max() < limits[name]:
            raise TraceError(
                f"{path}: {name}: got values from {array.min()} to {array.max()}, expected 0 to "
                f"{limits[name] - 1}; the trace is damaged or from another model"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise TraceError(f"{path}: {name}: contains NaN or infinite values; record again")

    def _refuse_repeated(self, ids_TLK: np.ndarray) -> None:
        """Raise TraceError if a token is sent to an expert twice, which no router does."""
        sorted_TLK = np.sort(ids_TLK, axis=2)
        places = np.argwhere(sorted_TLK[..., 1:] == sorted_TLK[..., :-1])
        if len(places):
            token, layer, rank = places[0].tolist()
            raise TraceError(
                f"{self.path}: layer {self.info.layers[layer]}, token {token}: lists expert "
                f"{sorted_TLK[token, layer, rank]} more than once; record the trace again"
            )


def _npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except Exception as error:  # numpy, zipfile and zlib raise many types for damaged bytes
        raise TraceError(
            f"{path}: not a trace, or damaged ({type(error).__name__}: {error}); "
            "restore it or record again"
        ) from error


def _published(path: Path) -> TraceInfo:
    ids = _npz(path, PUBLISHED)["ids"]
    if ids.ndim != 3 or 0 in ids.shape:
        raise TraceError(f"{path}: got ids of shape {ids.shape}, expected (tokens, layers, K)")
    tokens, layers, width = ids.shape
    return TraceInfo(
        model_type="deepseek_v2",
        checkpoint=path.stem,
        layers=tuple(range(1, 1 + layers)),  # decoder layer 0 is dense
        num_experts=DEEPSEEK_V2_LITE_EXPERTS,
        top_k=width,
        hidden_size=None,
        groups=(1, 1),
        domains=(path.stem.rpartition("routing_")[2],),
        fields=(*PUBLISHED, "domain"),
        parts=(Part(file=path.name, tokens=tokens, embeddings=0, crc32=0),),
    )


def _read_manifest(folder: Path) -> TraceInfo:
    path = folder / MANIFEST
    if not path.is_file():
        raise TraceError(
            f"{folder}: no {MANIFEST} found; the recording did not finish, or this is not a trace"
        )
    try:
        document = parse_json(path.read_bytes())
        written = document.get("format"), document.get("version")
        if written != (FORMAT, VERSION):
            raise TraceError(
                f"{path}: got format {written[0]!r} version {written[1]!r}, expected {FORMAT!r} "
                f"version {VERSION}; record again"
            )
        info = TraceInfo.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        problem = f"{where} {first['msg'].removeprefix('Value error, ')}".strip()
        raise TraceError(f"{path}: damaged: {problem}; record again") from error
    except (OSError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: damaged ({error}); record again") from error
    if not info.parts:
        raise TraceError(f"{path}: damaged: it contains no tokens; record again")
    return info
