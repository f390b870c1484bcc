"""Routing traces: which experts every token was sent to, read lazily from disk.

A trace is a folder with ``trace.json`` and compressed chunks (see ``trace_format``), written by
:class:`TraceWriter`. The ``.npz`` files in which the routing of DeepSeek-V2-Lite was published by
the ESFT authors open too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.routing.trace_format import (
    ChunkInfo,
    TraceInfo,
    load_arrays,
    read_chunk,
    read_manifest,
)
from moe_finetune.routing.trace_writer import TraceWriter

__all__ = ["RoutingTrace", "TraceChunk", "TraceInfo", "TraceWriter"]

IMPORTED_FIELDS = ("ids", "weights", "seq")
DEEPSEEK_V2_LITE_EXPERTS = 64


@dataclass(frozen=True)
class TraceChunk:
    """Consecutive tokens of a trace, the first of which is number ``start``: ``chunk["ids"]``."""

    start: int
    tokens: int
    arrays: dict[str, np.ndarray]

    def __getitem__(self, field: str) -> np.ndarray:
        """The array of a field requested from :meth:`RoutingTrace.chunks`."""
        return self.arrays[field]


class RoutingTrace:
    """A trace on disk. Only the manifest is read until arrays are requested."""

    def __init__(self, path: Path, info: TraceInfo):
        self.path = path
        self.info = info

    @classmethod
    def open(cls, path: str | Path) -> RoutingTrace:
        """Open a trace folder, or an ``.npz`` of the published DeepSeek-V2-Lite layout.

        Args:
            path: folder with ``trace.json``; or a file with ``ids`` int16 ``(T, L, K)``,
                ``weights`` float32 of the same shape and ``seq`` ``(T,)``.
        """
        path = Path(path)
        if path.is_dir():
            return cls(path, read_manifest(path))
        if path.is_file():
            return cls(path, _import(path))
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
        return sum(chunk.embeddings for chunk in self.info.chunks)

    def has(self, field: str) -> bool:
        """Whether the trace has ``field`` (a key of ``trace_format.FIELDS``)."""
        return field in self.info.fields

    def chunks(self, *fields: str) -> Iterator[TraceChunk]:
        """Yield the trace chunk by chunk with the arrays of ``fields`` (default ids, weights)."""
        names = fields or ("ids", "weights")
        self._require(names)
        start = 0
        folder = self.path if self.path.is_dir() else self.path.parent
        for chunk in self.info.chunks:
            stored = [n for n in names if n != "domain" or self.path.is_dir()]
            arrays = read_chunk(folder / chunk.file, self.info, chunk, stored)
            if len(stored) < len(names):
                arrays["domain"] = np.zeros(chunk.tokens, np.int16)  # an import has one domain
            if "ids" in arrays and not self.path.is_dir():
                self._refuse_repeated(arrays["ids"])
            yield TraceChunk(start, chunk.tokens, arrays)
            start += chunk.tokens

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

    def load(self, field: str, domain: str | None = None) -> np.ndarray:
        """One field of the whole trace in memory, in the order of the tokens.

        ``domain``: only the tokens of that domain. Raises TraceError for a field or domain that the
        trace does not contain.
        """
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


def _import(path: Path) -> TraceInfo:
    """The manifest of a published ``.npz`` trace; its arrays are checked when read."""
    ids = load_arrays(path, IMPORTED_FIELDS)["ids"]
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
        domains=(path.stem.rpartition("routing_")[2],),
        fields=(*IMPORTED_FIELDS, "domain"),
        chunks=(ChunkInfo(file=path.name, tokens=tokens, embeddings=0, bytes=path.stat().st_size),),
    )
