"""Record a routing trace with the memory of a part.

N are sampled tokens.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from safetensors.numpy import save

from moe_finetune.errors import OutputExistsError, TraceError
from moe_finetune.io import write_atomic
from moe_finetune.metrics.arrays import Array, check_shape, floats, integers, to_numpy
from moe_finetune.metrics.paths import top_choice
from moe_finetune.routing.trace import FIELDS, FORMAT, MANIFEST, VERSION, Part, TraceInfo

PART_BYTES = 48_000_000


class TraceWriter:
    """Writes a trace batch by batch into a new or empty folder; a context manager.

    Each of ``domains`` needs at least one token at the end. ``embedding_share`` of the tokens have
    their embeddings sampled, by ``seed``; ``part_bytes`` bounds the memory.
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
        groups: tuple[int, int] | None = None,
        domains: Sequence[str] = ("all",),
        weights_dtype: str = "float16",
        embedding_share: float = 0.0,
        seed: int = 0,
        part_bytes: int = PART_BYTES,
    ):
        self.folder = Path(folder)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise OutputExistsError(
                f"{self.folder}: is not empty; choose another folder for the trace"
            )
        self._info = TraceInfo(
            model_type=model_type, checkpoint=checkpoint, layers=tuple(layers),
            num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, groups=groups,
            domains=tuple(domains),
        )  # fmt: skip
        self._weights_dtype = np.dtype(weights_dtype)
        self._share, self._rng = embedding_share, np.random.default_rng(seed)
        self._part_bytes = part_bytes
        self._pending: list[dict[str, np.ndarray]] = []
        self._parts: list[Part] = []
        self._fields: tuple[str, ...] = ()
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
        norms_TLK: Array | None = None,
        token_ids_T: Array | None = None,
        positions_N: Array | None = None,
        embeddings_NLH: Array | None = None,
    ) -> None:
        """Add the tokens of a batch, without padding; every batch has the same kinds of arrays.

        Args:
            weights_TLK: routing weights, or None if unknown.
            seq_T: number of the sequence of each token, unique over the trace.
            probs_TLE: probabilities of all experts, stored as float16.
            norms_TLK: L2 length of each selected expert's output before its weight.
            positions_N: positions in this batch of the sampled tokens.
            embeddings_NLH: each sampled token's input to every MoE block.
        """
        info, layers = self._info, len(self._info.layers)
        ids = integers("index_TLK", index_TLK, ("T", layers, info.top_k), limit=info.num_experts)
        tokens, position = len(ids), info.domains.index(domain)
        arrays: dict[str, np.ndarray] = {
            "ids": ids.astype(np.int16),
            "seq": integers("seq_T", seq_T, (tokens,)).astype(np.int32),
            "domain": np.full(tokens, position, np.int16),
        }
        if weights_TLK is not None:
            weights = floats(
                "weights_TLK", weights_TLK, (tokens, layers, info.top_k), as_given=True
            )
            arrays["weights"] = weights.astype(self._weights_dtype)
        if norms_TLK is not None:
            shape = tokens, layers, info.top_k
            arrays["norms"] = floats("norms_TLK", norms_TLK, shape, True).astype(np.float32)
        if probs_TLE is not None:
            shape = (tokens, layers, info.num_experts)
            arrays["probs"] = floats("probs_TLE", probs_TLE, shape, True).astype(np.float16)
        if token_ids_T is not None:
            arrays["token_ids"] = integers("token_ids_T", token_ids_T, (tokens,)).astype(np.int32)
        if positions_N is not None:
            at_N = to_numpy(positions_N).astype(np.int64)
            labels_NL = top_choice(arrays["ids"][at_N], to_numpy(weights_TLK)[at_N])
            arrays["embedding_labels"] = labels_NL
            arrays["embeddings"] = self._narrowed(to_numpy(embeddings_NLH), len(at_N))
        self._fields = tuple(name for name in FIELDS if name in arrays)
        self._domain_tokens[position] += tokens
        self._pending.append(arrays)
        if sum(a.nbytes for batch in self._pending for a in batch.values()) >= self._part_bytes:
            self._flush()

    def _narrowed(self, embeddings_NLH: np.ndarray, count: int) -> np.ndarray:
        """The embeddings in float16, or in float32 if they overflow it."""
        shape = (count, len(self._info.layers), self._info.hidden_size or "H")
        check_shape("embeddings_NLH", embeddings_NLH, shape)
        if count:
            floats("embeddings_NLH", embeddings_NLH, ("N", "L", "H"), as_given=True)
        fits = np.abs(embeddings_NLH).max(initial=0.0) <= np.finfo(np.float16).max
        return embeddings_NLH.astype(np.float16 if fits else np.float32)

    def _flush(self) -> None:
        if not self._pending:
            return
        arrays = {n: np.concatenate([b[n] for b in self._pending]) for n in self._pending[0]}
        content, file = save(arrays), f"part-{len(self._parts):05d}.safetensors"
        write_atomic(self.folder / file, content)
        sampled = len(arrays.get("embeddings", ()))
        part = Part(file=file, tokens=len(arrays["ids"]), embeddings=sampled,
                    crc32=zlib.crc32(content))  # fmt: skip
        self._parts.append(part)
        self._pending = []

    def close(self) -> TraceInfo:
        """Write the last part and the manifest; TraceError if a declared domain is empty."""
        counts = zip(self._info.domains, self._domain_tokens, strict=True)
        empty = [name for name, tokens in counts if not tokens]
        if empty:
            raise TraceError(
                f"{self.folder}: no tokens of domain {', '.join(map(repr, empty))} were "
                "recorded; check its data, or leave the domain out"
            )
        self._flush()
        info = self._info.model_copy(update={"fields": self._fields, "parts": tuple(self._parts)})
        document = {"format": FORMAT, "version": VERSION, **info.model_dump()}
        write_atomic(self.folder / MANIFEST, json.dumps(document, indent=1) + "\n")
        return info

    def __enter__(self) -> Self:
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
