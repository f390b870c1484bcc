"""Replies that survive a kill: a request cache keyed by checkpoint, settings and request.

Requests are sorted by length and cut into chunks with fixed borders. A chunk is asked for and
stored as a whole, so a continued run sends the very batches that the uninterrupted one would have
sent, and gets the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import sha256_json, to_json


class ReplyStore:
    """An append-only JSONL file of replies; every line carries its own checksum.

    A half-written last line (a kill) is cut off on opening; a damaged line elsewhere is dropped
    and asked again, never trusted.

    Args:
        path: the file; its folder is made.
        identity: what all replies depend on (checkpoint hash, settings). A file written for
            another identity is refused.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.dropped = 0
        self._replies: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"identity": sha256_json(identity)}
        good = self._load(header) if path.exists() else None
        if good is None or self.dropped:
            lines = [] if good is None else good
            write_atomic(path, b"".join([_line(header), *lines]))
        self._stream = path.open("ab")

    def _load(self, header: dict[str, Any]) -> list[bytes] | None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        first = _parse(lines[0]) if lines else None
        if first is None:
            return None
        if first != header:
            raise EvaluationError(
                f"{self.path} holds replies of another checkpoint or other settings; "
                "remove the file or choose another output folder"
            )
        good = []
        for line in lines[1:]:
            record = _parse(line)
            if record is None:
                self.dropped += 1
            else:
                good.append(line)
                self._replies[record["key"]] = record["reply"]
        return good

    def __contains__(self, key: str) -> bool:
        return key in self._replies

    def __getitem__(self, key: str) -> Any:
        return self._replies[key]

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, replies: Iterable[tuple[str, Any]]) -> None:
        """Append replies and make them safe on the disk."""
        for key, reply in replies:
            record = {"key": key, "reply": reply}
            self._stream.write(_line(record))
            self._replies[key] = json.loads(to_json(reply))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _line(record: dict[str, Any]) -> bytes:
    body = to_json(record).encode("utf-8", "surrogatepass")
    return hashlib.sha256(body).hexdigest()[:16].encode() + b" " + body + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or hashlib.sha256(body).hexdigest()[:16].encode() != checksum:
        return None
    return json.loads(body.decode("utf-8", "surrogatepass"))


def answer_all(
    kind: str,
    arguments: list[tuple[Any, ...]],
    ask: Callable[[list[int]], list[Any]],
    store: ReplyStore,
    chunk: int,
    progress: Callable[[list[int], bool], None] | None = None,
) -> list[Any]:
    """Return a reply for every request, asking only for chunks that are not stored whole.

    Args:
        kind: request type ("loglikelihood", "generate_until", ...), part of the key.
        arguments: one tuple of JSON values per request.
        ask: indices of one chunk -> their replies.
        store: where replies are kept.
        chunk: requests a chunk.
        progress: called after each chunk with its indices and whether it was stored already.
    """
    seen: dict[str, int] = {}
    keys = []
    for args in arguments:
        base = sha256_json([kind, list(args)])
        # The same request twice (sampled repeats) has two replies, told apart by their count.
        seen[base] = seen.get(base, -1) + 1
        keys.append(f"{base}:{seen[base]}")
    longest_first = sorted(
        range(len(keys)), key=lambda i: (-sum(len(str(a)) for a in arguments[i]), keys[i])
    )
    for start in range(0, len(longest_first), chunk):
        indices = longest_first[start : start + chunk]
        stored = all(keys[i] in store for i in indices)
        if not stored:
            store.add(zip([keys[i] for i in indices], ask(indices), strict=True))
        if progress is not None:
            progress(indices, stored)
    return [store[key] for key in keys]
