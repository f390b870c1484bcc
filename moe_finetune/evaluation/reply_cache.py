"""A request cache that survives a kill, keyed by checkpoint, settings and request.

Requests are sorted by length and split into fixed chunks. A chunk is sent and stored as a whole, so
a resumed run sends exactly the batches of an uninterrupted one, and gets the same bits.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_finetune.errors import DiskSpaceError, EvaluationError, OutputBusyError
from moe_finetune.io.hashes import sha256_json, to_json

_TABLES = """
CREATE TABLE IF NOT EXISTS identity (sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply BLOB) WITHOUT ROWID;
"""


class ReplyStore:
    """Replies in an SQLite file, which rolls back on opening what a kill interrupted.

    May be used by several threads, one at a time. ``identity`` is everything that all replies
    depend on.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._database = sqlite3.connect(path, check_same_thread=False)
            self._database.executescript(_TABLES)
            stored = self._database.execute("SELECT sha256 FROM identity").fetchone()
            expected = (sha256_json(identity),)
            if stored is None:
                with self._database:
                    self._database.execute("INSERT INTO identity VALUES (?)", expected)
        if stored not in (None, expected):
            self.close()
            raise EvaluationError(
                f"{path} has replies of another checkpoint or other settings; remove the file, "
                "or choose another output folder"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_FULL":
                raise DiskSpaceError(
                    f"{self.path}: no space left on the disk; free some space and repeat the "
                    "command, which continues"
                ) from error
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise OutputBusyError(
                    f"{self.path}: another process is writing replies there; wait for it to end"
                ) from error
            raise EvaluationError(
                f"{self.path}: cannot be used to store replies ({error}); remove it to send its "
                "requests again"
            ) from error

    def _row(self, key: str) -> tuple[bytes] | None:
        with self._errors():
            query = "SELECT reply FROM replies WHERE key = ?"
            return self._database.execute(query, (key,)).fetchone()

    def __contains__(self, key: str) -> bool:
        return self._row(key) is not None

    def __getitem__(self, key: str) -> Any:
        row = self._row(key)
        if row is None:
            raise KeyError(key)
        return json.loads(row[0].decode("utf-8", "surrogatepass"))

    def add(self, replies: Iterable[tuple[str, Any]]) -> None:
        """Store replies, all of them or none, safe on the disk."""
        rows = [(key, to_json(reply).encode("utf-8", "surrogatepass")) for key, reply in replies]
        with self._errors(), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO replies (key, reply) VALUES (?, ?)", rows
            )

    def close(self) -> None:
        self._database.close()


def answer_all(
    kind: str,
    arguments: list[tuple[Any, ...]],
    ask: Callable[[list[int]], list[Any]],
    store: ReplyStore,
    chunk: int,
    progress: Callable[[list[int], bool], None] | None = None,
) -> list[Any]:
    """A reply for every request; only chunks that are not stored completely are asked for.

    ``ask`` gets the indices of a chunk, ``progress`` also whether it was stored.
    """
    seen: dict[str, int] = {}
    keys = []
    for args in arguments:
        base = sha256_json([kind, list(args)])
        # The same request twice (sampled repeats) has two replies, distinguished by their count.
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
