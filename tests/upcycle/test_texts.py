from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.upcycle.corpus import PIECE, SOURCES, read_corpus
from moe_finetune.upcycle.recipe import TextSection
from moe_finetune.upcycle.texts import (
    SPLITS,
    Texts,
    read_categories,
    remark_on_repetitions,
    split_texts,
)
from tests import tiny
from tests.upcycle import dense


@pytest.fixture
def texts():
    categories = {
        "short": [f"text {i}" for i in range(13)],
        "long": [f"{i} is a longer text, with {i * i}." * 3 for i in range(21)],
    }
    return categories, Texts.tokenize(categories, tiny.tokenizer(), seed=4)


@pytest.mark.parametrize("count", [3, 10, 23, 200])
def test_texts_are_split_eight_one_one(count):
    given = [f"text {i}" for i in range(count)]
    parts = split_texts(given, seed=1)
    tenth = max(1, round(count / 10))
    assert [len(parts[split]) for split in SPLITS] == [count - 2 * tenth, tenth, tenth]
    assert sorted(text for part in parts.values() for text in part) == sorted(given)
    assert parts == split_texts(given, seed=1)
    if count > 3:
        assert parts != split_texts(given, seed=2)


def test_documents_are_the_texts_with_their_end(texts):
    categories, tokenized = texts
    tokenizer = tiny.tokenizer()
    for number, raw in enumerate(categories.values()):
        for split, part in split_texts(raw, 4).items():
            held = tokenized.documents(split, number)
            assert [tokenizer.decode(ids[:-1]) for ids in held] == part
            assert {int(ids[-1]) for ids in held} == {tokenizer.eos_token_id}


def test_blocks_are_the_training_texts_end_to_end(texts, tmp_path):
    _, tokenized = texts
    tokenized.save(tmp_path)
    mapped, file = Texts.load(tmp_path), tmp_path / "rows.bin"
    rows = mapped.blocks([0, 1], 11, 3, file)
    assert isinstance(rows, np.memmap) and file.stat().st_size < 4 * (rows.size + 11)
    assert all(isinstance(held, np.memmap) for held in mapped.arrays.values() if held.size)
    for name, held in tokenized.arrays.items():
        np.testing.assert_array_equal(mapped.arrays[name], held)
    stream = [ids for c in (0, 1) for ids in tokenized.documents("train", c)]
    total = sum(map(len, stream))
    assert rows.shape == (total // 11, 11)
    flat = rows.ravel().tolist()
    end = tiny.tokenizer().eos_token_id
    found = set()
    piece: list[int] = []
    for token in flat:
        piece.append(token)
        if token == end:
            found.add(tuple(piece))
            piece = []
    assert found <= {tuple(ids.tolist()) for ids in stream}
    assert len(found) >= len(stream) - 1, "only the end of the last text may be cut off"
    assert not np.array_equal(rows, tokenized.blocks([0, 1], 11, 4, tmp_path / "other"))
    with pytest.raises(DataError, match=r"short: .* training tokens are less than one row"):
        tokenized.blocks([0], 5000, 0, file)


def test_windows_begin_the_texts(texts):
    _, tokenized = texts
    documents = tokenized.documents("train", 1)
    windows = tokenized.windows("train", 1, 7)
    assert [w.tolist() for w in windows] == [ids[:7].tolist() for ids in documents]
    thinned = tokenized.windows("train", 1, 7, limit=3)
    assert [w.tolist() for w in thinned] == [windows[i].tolist() for i in (0, 8, 16)]


def test_counts_are_those_of_the_training_texts(texts):
    _, tokenized = texts
    counts_CV = tokenized.counts(tiny.VOCABULARY)
    assert counts_CV.shape == (2, tiny.VOCABULARY)
    for category in (0, 1):
        ids = [int(i) for text in tokenized.documents("train", category) for i in text]
        for token in (tiny.tokenizer().eos_token_id, ids[0], ids[5], 399):
            assert counts_CV[category, token] == ids.count(token)


def test_saved_is_loaded(texts, tmp_path):
    _, tokenized = texts
    tokenized.save(tmp_path)
    loaded = Texts.load(tmp_path)
    assert loaded.categories == tokenized.categories
    assert all(np.array_equal(loaded.arrays[k], v) for k, v in tokenized.arrays.items())
    (tmp_path / "tokens.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="run the stage 'dense' again"):
        Texts.load(tmp_path)


def test_categories_are_read_from_files(tmp_path):
    files = dense.write_categories(tmp_path, 3)
    found = read_categories(TextSection(categories=files, limit=12))
    assert list(found) == ["kind0", "kind1", "kind2"] and len(found["kind1"].texts) == 12
    assert remark_on_repetitions(found) is None
    line = Path(files["kind1"]).read_text().splitlines()[0]
    Path(files["kind1"]).write_text(f"{line}\n" * 5)
    said = r"texts\.categories\.kind1: 1 different texts \(4 of 5 rows repeat others\)"
    with pytest.raises(DataError, match=said):
        read_categories(TextSection(categories=files))
    rows = [*Path(files["kind0"]).read_text().splitlines()[:4], line, line]
    Path(files["kind1"]).write_text("\n".join(rows))
    found = read_categories(TextSection(categories=files))
    assert len(found["kind1"].texts) == 5
    assert "kind1 1 of 6" in (remark_on_repetitions(found) or "")
    Path(files["kind1"]).write_text(json.dumps({"txt": "no"}) + "\n")
    with pytest.raises(DataError, match=r"kind1\.jsonl:1: no field 'text'"):
        read_categories(TextSection(categories=files))


def test_the_built_in_corpus_has_every_category():
    corpus = read_corpus()
    assert list(corpus) == list(SOURCES) and len(corpus) == 24
    assert corpus == read_corpus()
    for category, pieces in corpus.items():
        assert len(pieces) >= 10, category
        assert all(PIECE // 4 <= len(piece) < 4 * PIECE for piece in pieces), category
