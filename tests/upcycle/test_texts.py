import json
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.upcycle.categories import read_categories, remark_on_repetitions
from moe_finetune.upcycle.judgement import check_answers
from moe_finetune.upcycle.schema import TextSection, load_upcycle_recipe
from moe_finetune.upcycle.texts import SPLITS, Texts, opening_ids, splits_of
from recipes.upcycle.corpus import PIECE, SOURCES, main, read_corpus
from tests.conftest import ROOT
from tests.support import tiny
from tests.upcycle import dense


def documents(texts, split, category):
    return list(texts.ids(texts.numbers(split, category)))


def split_texts(texts, seed):
    split_T = splits_of(len(texts), seed).tolist()
    pairs = list(zip(texts, split_T, strict=True))
    return {split: [t for t, s in pairs if s == n] for n, split in enumerate(SPLITS)}


@pytest.fixture
def texts(tmp_path):
    categories = {
        "short": [f"text {i}" for i in range(13)],
        "long": [f"{i} is a longer text, with {i * i}." * 3 for i in range(21)],
    }
    (tmp_path / "texts").mkdir()
    return categories, Texts.tokenize(categories, tiny.tokenizer(), 4, tmp_path / "texts")


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
            held = documents(tokenized, split, number)
            assert [tokenizer.decode(ids[:-1]) for ids in held] == part
            assert {int(ids[-1]) for ids in held} == {tokenizer.eos_token_id}


def test_blocks_are_the_training_texts_end_to_end(texts, tmp_path):
    _, tokenized = texts
    file = tmp_path / "rows.bin"
    mapped = tokenized.blocks([0, 1], 11, 3, file)
    assert [Path(each["filename"]) for each in mapped.cache_files] == [file]
    rows = np.array(mapped["input_ids"])
    stream = [ids for c in (0, 1) for ids in documents(tokenized, "train", c)]
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
    other = tokenized.blocks([0, 1], 11, 4, tmp_path / "other")
    assert not np.array_equal(rows, other["input_ids"])
    with pytest.raises(DataError, match=r"short: .* training tokens are fewer than one row of"):
        tokenized.blocks([0], 5000, 0, file)


def test_windows_begin_the_texts(texts):
    _, tokenized = texts
    whole = documents(tokenized, "train", 1)
    windows = tokenized.windows("train", 1, 7)
    assert [w.tolist() for w in windows] == [ids[:7].tolist() for ids in whole]
    thinned = tokenized.windows("train", 1, 7, limit=3)
    assert [w.tolist() for w in thinned] == [windows[i].tolist() for i in (0, 8, 16)]


def test_counts_are_those_of_the_training_texts(texts):
    _, tokenized = texts
    counts_CV = tokenized.counts(tiny.VOCABULARY)
    assert counts_CV.shape == (2, tiny.VOCABULARY)
    for category in (0, 1):
        ids = [int(i) for text in documents(tokenized, "train", category) for i in text]
        for token in (tiny.tokenizer().eos_token_id, ids[0], ids[5], 399):
            assert counts_CV[category, token] == ids.count(token)


def test_saved_is_loaded(texts, tmp_path):
    categories, tokenized = texts
    loaded = Texts.load(tmp_path / "texts")
    assert loaded.categories == tuple(categories)
    for split in SPLITS:
        for category in (0, 1):
            ids = documents(tokenized, split, category)
            assert loaded.tokens(split, category) == sum(map(len, ids)) > 0
            for ours, theirs in zip(documents(loaded, split, category), ids, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    (tmp_path / "texts/tokens.arrow").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="run the stage 'dense' again"):
        Texts.load(tmp_path / "texts")


def with_bos(tokenizer, bos="<|im_start|>"):
    """The tokenizer with a BOS token before every sequence, as Llama's has."""
    from tokenizers.processors import TemplateProcessing

    bos_id = tokenizer.convert_tokens_to_ids(bos)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
    return tokenizer, bos_id


def test_texts_begin_as_the_tokenizer_begins_a_sequence(texts, tmp_path):
    categories, plain = texts
    tokenizer, bos = with_bos(tiny.tokenizer())
    assert (opening_ids(tiny.tokenizer()), opening_ids(tokenizer)) == ([], [bos])
    (tmp_path / "bos").mkdir()
    opened = Texts.tokenize(categories, tokenizer, 4, tmp_path / "bos")
    for split in SPLITS:
        pairs = zip(documents(opened, split, 1), documents(plain, split, 1), strict=True)
        for ids, without in pairs:
            assert ids.tolist() == [bos, *without.tolist()]
            assert ids[:-1].tolist() == tokenizer(tokenizer.decode(ids[1:-1]))["input_ids"]
    assert opened.windows("test", 1, 5)[0].tolist() == [bos, *plain.windows("test", 1, 4)[0]]
    counts_CV = opened.counts(tiny.VOCABULARY)
    assert counts_CV[:, bos].tolist() == [len(opened.numbers("train", c)) for c in (0, 1)]


def test_a_text_of_two_categories_counts_in_the_first(tmp_path):
    files = dense.write_categories(tmp_path, 3)
    shared = Path(files["kind0"]).read_text().splitlines()[4:7]
    lines = Path(files["kind2"]).read_text().splitlines()
    Path(files["kind2"]).write_text(
        "\n".join([*lines[:9], *shared, lines[2], *lines[9:], shared[1]])
    )
    found = read_categories(TextSection(categories=files))
    assert list(found["kind2"]) == [json.loads(line)["text"] for line in lines]
    assert len(found["kind0"]) == 20 and found["kind2"].repeated == 5
    assert remark_on_repetitions(found) == (
        "rows that repeat another of their category or of an earlier one are dropped: kind2 5 of 25"
    )
    Path(files["kind2"]).write_text("\n".join([*shared, *lines[:2]]))
    with pytest.raises(DataError, match=r"kind2: 2 different texts \(3 of 5 rows repeat others"):
        read_categories(TextSection(categories=files))


def test_categories_are_read_from_files(tmp_path):
    files = dense.write_categories(tmp_path, 3)
    found = read_categories(TextSection(categories=files, limit=12))
    assert list(found) == ["kind0", "kind1", "kind2"] and len(found["kind1"]) == 12
    assert remark_on_repetitions(found) is None
    line, *others = Path(files["kind1"]).read_text().splitlines()
    Path(files["kind1"]).write_text(f"{line}\n" * 5)
    said = r"texts\.categories\.kind1: 1 different texts \(4 of 5 rows repeat others"
    with pytest.raises(DataError, match=said):
        read_categories(TextSection(categories=files))
    rows = [*others[:4], line, line]
    Path(files["kind1"]).write_text("\n".join(rows))
    found = read_categories(TextSection(categories=files))
    assert len(found["kind1"]) == 5
    assert "kind1 1 of 6" in (remark_on_repetitions(found) or "")
    Path(files["kind1"]).write_text(json.dumps({"txt": "no"}) + "\n")
    with pytest.raises(DataError, match=r"kind1\.jsonl:1: no field 'text'"):
        read_categories(TextSection(categories=files))


@pytest.mark.slow
def test_the_miniatures_corpus_has_every_category(tmp_path, monkeypatch):
    corpus = read_corpus()
    assert list(corpus) == list(SOURCES) and len(corpus) == 24
    assert corpus == read_corpus()
    for category, pieces in corpus.items():
        assert len(pieces) >= 10, category
        assert all(PIECE // 4 <= len(piece) < 4 * PIECE for piece in pieces), category
    main(tmp_path)
    recipe = load_upcycle_recipe([ROOT / "recipes/upcycle/miniature.yaml", tmp_path / "texts.yaml"])
    assert list(recipe.texts.categories) == list(SOURCES)
    tokenizer = load_tokenizer(recipe.dense.pretrained.tokenizer)
    assert len(tokenizer) == 1024
    monkeypatch.chdir(tmp_path)  # where the suite is found as shipped recipes are
    check_answers(recipe.evaluation.suite, tokenizer)
