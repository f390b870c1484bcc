"""Stored replies: what comes back, what is refused, what is asked again."""

import sqlite3
from contextlib import closing

import pytest

from moe_finetune.errors import EvaluationError, OutputBusyError
from moe_finetune.evaluation.reply_cache import ReplyStore, answer_all

IDENTITY = {"checkpoint": "a", "settings": {"seed": 0}}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "cache" / "replies.sqlite"


def stored(file, replies):
    store = ReplyStore(file, IDENTITY)
    store.add(replies)
    store.close()


def test_replies_come_back_as_they_were(file):
    stored(file, [("a", (-1.5, True)), ("b", "half a pair: \ud83d"), ("c", "")])
    store = ReplyStore(file, IDENTITY)
    assert (store["a"], store["b"], store["c"]) == ([-1.5, True], "half a pair: \ud83d", "")
    assert "d" not in store
    with pytest.raises(KeyError):
        store["d"]
    store.close()


def test_a_chunk_is_stored_whole_or_not_at_all(file):
    def broken():
        yield "a", 1
        raise RuntimeError("the model stopped")

    store = ReplyStore(file, IDENTITY)
    with pytest.raises(RuntimeError):
        store.add(broken())
    assert "a" not in store
    store.close()


def test_only_chunks_that_are_not_stored_whole_are_asked(file):
    asked: list[list[int]] = []

    def ask(indices):
        asked.append(indices)
        return [f"reply {i}" for i in indices]

    arguments = [("x" * (7 - i),) for i in range(5)]
    store = ReplyStore(file, IDENTITY)
    assert answer_all("k", arguments[:3], ask, store, 2) == ["reply 0", "reply 1", "reply 2"]
    assert answer_all("k", arguments, ask, store, 2) == [f"reply {i}" for i in range(5)]
    store.close()
    assert asked == [[0, 1], [2], [2, 3], [4]]


def test_another_identity_and_other_files_are_refused(file):
    stored(file, [("a", 1)])
    with pytest.raises(EvaluationError, match="another checkpoint or other settings"):
        ReplyStore(file, {"checkpoint": "b"})
    stored(file, [("b", 2)])  # and left as it was
    file.write_bytes(b'0123456789abcdef {"identity": "of an earlier version"}\n' * 40)
    held = file.read_bytes()
    with pytest.raises(EvaluationError, match=r"replies\.sqlite: cannot be used .* remove it"):
        ReplyStore(file, IDENTITY)
    assert file.read_bytes() == held


def test_a_store_that_another_process_writes_is_not_to_be_removed(file, monkeypatch):
    stored(file, [("a", 1)])
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, timeout=0.1, **k))
    with closing(connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OutputBusyError, match="another process is writing") as problem:
            ReplyStore(file, IDENTITY)
    assert "remove" not in str(problem.value)
    store = ReplyStore(file, IDENTITY)
    assert store["a"] == 1
    store.close()


def test_a_store_with_the_checksums_of_an_earlier_version_is_read(file):
    stored(file, [("a", 1)])
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("ALTER TABLE replies ADD COLUMN checksum BLOB")
    stored(file, [("b", 2)])
    store = ReplyStore(file, IDENTITY)
    assert (store["a"], store["b"]) == (1, 2)
    store.close()
