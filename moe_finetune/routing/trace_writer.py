"""Record a routing trace with bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from moe_finetune.errors import OutputExistsError, TraceError
from moe_finetune.metrics.arrays import Array, check_shape, floats, integers, to_numpy
from moe_finetune.metrics.paths import top_choice
from moe_finetune.routing.trace_format import (
    EMBEDDING_FIELDS,
    FIELDS,
    ChunkInfo,
    TraceInfo,
    write_chunk,
    write_manifest,
)

CHUNK_BYTES = 48_000_000


class TraceWriter:
    """Writes a trace batch by batch; the manifest comes last, so a broken recording has none.

    Example::

        with TraceWriter(folder, model_type="olmoe", layers=range(16), ...) as writer:
            writer.append(ids_TLK, weights_TLK, seq_T, domain="law")

    Args:
        folder: new or empty; anything else raises OutputExistsError.
        model_type, checkpoint, layers, num_experts, top_k, hidden_size: see ``TraceInfo``.
        domains: names that the trace must contain; each needs at least one token at the end.
        weights_dtype: ``float16`` or ``float32`` on disk.
        embedding_share: share of tokens whose embeddings are sampled, by ``seed``.
        chunk_bytes: uncompressed size at which a chunk is written; bounds the memory.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model_type: str,
        checkpoint: str,
        layers: Sequence[int],
        num_experts: int,
        top_k: int,
        hidden_size: int | None = None,
        domains: Sequence[str] = ("all",),
        weights_dtype: str = "float16",
        embedding_share: float = 0.0,
        seed: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self.folder = Path(folder)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise OutputExistsError(
                f"{self.folder}: is not empty; choose another folder for the trace"
            )
        self._info = TraceInfo(
            model_type=model_type,
            checkpoint=checkpoint,
            layers=tuple(int(layer) for layer in layers),
            num_experts=int(num_experts),
            top_k=int(top_k),
            hidden_size=hidden_size,
            domains=tuple(domains),
        )
        self._shape = (len(self._info.layers), num_experts, top_k)
        self._weights_dtype = np.dtype(weights_dtype)
        self._share = embedding_share
        self._rng = np.random.default_rng(seed)
        self._chunk_bytes = chunk_bytes
        self._fields: tuple[str, ...] = ()
        self._pending: list[dict[str, np.ndarray]] = []
        self._pending_bytes = 0
        self._chunks: list[ChunkInfo] = []
        self._tokens = 0
        self._domain_tokens = np.zeros(len(domains), np.int64)
        self.folder.mkdir(parents=True, exist_ok=True)

    def sample(self, tokens: int) -> np.ndarray:
        """Positions in a batch of ``tokens`` whose embeddings to hand to :meth:`append`."""
        return np.flatnonzero(self._rng.random(tokens) < self._share)

    def append(
        self,
        index_TLK: Array,
        weights_TLK: Array | None,
        seq_T: Array,
        domain: str = "all",
        *,
        probs_TLE: Array | None = None,
        token_ids_T: Array | None = None,
        positions_N: Array | None = None,
        embeddings_NLH: Array | None = None,
    ) -> None:
        """Add the tokens of a batch, without padding.

        Args:
            index_TLK: selected experts, ``(T, L, K)``.
            weights_TLK: their routing weights, or None if the engine does not return them.
            seq_T: number of the sequence of each token, unique over the trace.
            domain: the batch's domain.
            probs_TLE: probabilities of all experts, stored as float16.
            token_ids_T: input ids.
            positions_N: ascending positions in this batch of the sampled tokens.
            embeddings_NLH: each sampled token's input to every MoE block.

        Every batch must have the same kinds of arrays. Raises ValueError that names the argument.
        """
        layers, experts, width = self._shape
        index = integers("index_TLK", index_TLK, ("T", layers, width), limit=experts)
        tokens = len(index)
        arrays: dict[str, np.ndarray] = {
            "ids": index.astype(np.int16),
            "seq": integers("seq_T", seq_T, (tokens,)).astype(np.int32),
            "domain": np.full(tokens, self._info.domains.index(domain), np.int16),
        }
        if weights_TLK is not None:
            weights = floats("weights_TLK", weights_TLK, (tokens, layers, width), as_given=True)
            arrays["weights"] = weights.astype(self._weights_dtype)
        if probs_TLE is not None:
            probs = floats("probs_TLE", probs_TLE, (tokens, layers, experts), as_given=True)
            arrays["probs"] = probs.astype(np.float16)
        if token_ids_T is not None:
            arrays["token_ids"] = integers("token_ids_T", token_ids_T, (tokens,)).astype(np.int32)
        if positions_N is not None:
            positions = to_numpy(positions_N).astype(np.int64)
            arrays |= {
                "embedding_positions": positions,
                "embedding_labels": top_choice(
                    arrays["ids"][positions], to_numpy(weights_TLK)[positions]
                ),
                "embeddings": self._narrowed(to_numpy(embeddings_NLH), len(positions)),
            }
        self._fields = tuple(name for name in FIELDS if name in arrays)
        self._domain_tokens[arrays["domain"][0]] += tokens
        self._buffer(arrays, tokens)

    def close(self) -> TraceInfo:
        """Write the last chunk and the manifest; TraceError if a declared domain is empty."""
        empty = [
            name
            for name, tokens in zip(self._info.domains, self._domain_tokens, strict=True)
            if not tokens
        ]
        if empty:
            raise TraceError(
                f"{self.folder}: no tokens of domain {', '.join(map(repr, empty))} were "
                "recorded; check its data, or leave the domain out"
            )
        self._flush()
        info = self._info.model_copy(update={"fields": self._fields, "chunks": tuple(self._chunks)})
        write_manifest(self.folder, info)
        return info

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close after success; after an error, write no manifest."""
        if kind is None:
            self.close()

    def _narrowed(self, embeddings_NLH: np.ndarray, count: int) -> np.ndarray:
        """The embeddings in float16, or in float32 if they overflow it."""
        shape = (count, self._shape[0], self._info.hidden_size or "H")
        check_shape("embeddings_NLH", embeddings_NLH, shape)
        if count:
            floats("embeddings_NLH", embeddings_NLH, ("N", "L", "H"), as_given=True)
        fits = np.abs(embeddings_NLH).max(initial=0.0) <= np.finfo(np.float16).max
        return embeddings_NLH.astype(np.float16 if fits else np.float32)

    def _buffer(self, arrays: dict[str, np.ndarray], tokens: int) -> None:
        size = sum(array.nbytes for array in arrays.values())
        step = max(1, int(tokens * self._chunk_bytes / max(size, 1)))
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            part = {n: a[start:stop] for n, a in arrays.items() if n not in EMBEDDING_FIELDS}
            if "embeddings" in arrays:
                positions = arrays["embedding_positions"]
                span = slice(*np.searchsorted(positions, [start, stop]))
                part |= {name: arrays[name][span] for name in EMBEDDING_FIELDS}
                # In the file a position counts from the start of the whole trace.
                part["embedding_positions"] = part["embedding_positions"] + self._tokens
            self._pending.append(part)
            self._pending_bytes += sum(array.nbytes for array in part.values())
            if self._pending_bytes >= self._chunk_bytes:
                self._flush()
        self._tokens += tokens

    def _flush(self) -> None:
        if not self._pending:
            return
        arrays = {n: np.concatenate([p[n] for p in self._pending]) for n in self._pending[0]}
        path = self.folder / f"chunk-{len(self._chunks):05d}.npz"
        write_chunk(path, arrays)
        sampled = len(arrays.get("embedding_positions", ()))
        self._chunks.append(
            ChunkInfo(
                file=path.name,
                tokens=len(arrays["ids"]),
                embeddings=sampled,
                bytes=path.stat().st_size,
            )
        )
        self._pending, self._pending_bytes = [], 0
