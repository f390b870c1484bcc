"""Sources with columns of their own: filters, labels as words, limits, and what is refused."""

import json

import pytest

from moe_finetune.data import token_rows
from moe_finetune.data.load_rows import load_examples
from moe_finetune.data.sources import SourceReader, listed
from moe_finetune.errors import DataError
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.measures.routing_samples import sample_examples
from tests.data.loading import load_dataset_for
from tests.support import tiny


@pytest.fixture
def files(tmp_path):
    sentiment = [
        {"sentence": "bad", "label": 0, "task": "sst"},
        {"sentence": "odd", "label": 1, "task": "cola"},
        {"sentence": "good", "label": 1, "task": "sst"},
        {"sentence": "fine", "label": 1, "task": "sst"},
    ]
    sums = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+3=", "completion": "5"}]
    for name, rows in {"sentiment": sentiment, "sums": sums}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def section(train, **data):
    return Recipe.from_preset("none", "m", train, data=data).data


def classification(files, **changes):
    return {
        "path": str(files / "sentiment.jsonl"),
        "where": {"task": ["sst"]},
        "words": {"label": ["negative", "positive"]},
        "template": {"prompt": "{sentence}:", "completion": " {label}"},
        **changes,
    }


def rows(source, data):
    (source,) = listed([source], "train")
    return [row for _, row in SourceReader(source, data)]


def test_a_source_is_filtered_worded_and_limited(files):
    data = section([classification(files)])
    assert rows(data.train[0], data) == [
        {"prompt": "bad:", "completion": " negative"},
        {"prompt": "good:", "completion": " positive"},
        {"prompt": "fine:", "completion": " positive"},
    ]
    data = section([classification(files, limit=2)])
    kept = [row["prompt"] for row in rows(data.train[0], data)]
    assert len(kept) == 2 and kept == [p for p in ("bad:", "good:", "fine:") if p in kept]
    with pytest.raises(DataError, match=r"data limit\): is 4, but there are only 3"):
        rows(section([classification(files, limit=4)]).train[0], data)


def test_sources_of_different_columns_become_one_dataset(files):
    sums = str(files / "sums.jsonl")
    data = section([classification(files), sums], max_length=64)
    tokenizer = tiny.tokenizer()
    train, _ = load_dataset_for(data, tokenizer, seed=0)
    texts = sorted(
        tokenizer.decode(row["input_ids"]).removesuffix("<|endoftext|>") for row in train
    )
    assert texts == ["1+1=2", "2+3=5", "bad: negative", "fine: positive", "good: positive"]


def test_snapshots_see_every_source_in_its_own_form(files):
    data = section([classification(files), str(files / "sums.jsonl")], max_length=64)
    tokenizer = tiny.tokenizer()
    found = sample_examples(load_examples(data, tokenizer, seed=1).sources, 64)
    texts = {(row["domain"], tokenizer.decode(row["input_ids"])) for row in found}
    assert {(domain, text.partition("<|")[0]) for domain, text in texts} == {
        ("sentiment", "bad: negative"), ("sentiment", "good: positive"),
        ("sentiment", "fine: positive"), ("sums", "1+1=2"), ("sums", "2+3=5"),
    }  # fmt: skip


@pytest.mark.parametrize("limits", [{"limit": 3}, {"data": 4}])
def test_snapshots_see_the_rows_that_are_trained_on(files, monkeypatch, limits):
    data = section(
        [classification(files), {"path": str(files / "more.jsonl"), "limit": limits.get("limit")}],
        max_length=64,
        limit=limits.get("data"),
    )
    more = [{"prompt": f"{n}=", "completion": f"{n * n}"} for n in range(30)]
    (files / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    tokenizer = tiny.tokenizer()
    drawn = []
    for seed in (5, 6):
        found = load_examples(data, tokenizer, seed)
        sampled = [row["input_ids"] for row in sample_examples(found.sources, 64)]
        assert sorted(sampled) == sorted(found.train["input_ids"])
        assert found.train.column_names == ["input_ids", "labels"]
        drawn.append(sorted(sampled))
    assert drawn[0] != drawn[1]
    monkeypatch.setattr(token_rows, "tokenize_row", None)  # all of it is prepared
    again = sample_examples(load_examples(data, tokenizer, 6).sources, 64)
    assert sorted(row["input_ids"] for row in again) == drawn[1]


def test_snapshots_see_held_out_rows_where_there_are_some(files):
    sums = str(files / "sums.jsonl")
    data = section([classification(files)], validation=[sums, sums], max_length=64)
    found = load_examples(data, tiny.tokenizer(), seed=1)
    assert [(path, len(rows)) for path, rows in found.sources] == [(sums, 2), (sums, 2)]
    sampled = [row["input_ids"] for row in sample_examples(found.sources, 64)]
    assert sampled == list(found.validation["input_ids"])


def test_what_a_source_leaves_out_is_the_sections(files):
    data = section(
        [{"path": str(files / "sentiment.jsonl"), "where": {"label": [0]}}],
        template={"prompt": "{task}?", "completion": "{sentence}"},
    )
    assert rows(data.train[0], data) == [{"prompt": "sst?", "completion": "bad"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"where": {"task": ["mnli"]}}, r"sentiment\.jsonl has no row whose task is one of"),
        ({"where": {"tsk": ["sst"]}}, r"jsonl:1: no field 'tsk'.*did you mean 'task'"),
        ({"words": {"label": ["only"]}}, r"jsonl:3: 'label': must be a number from 0 to 0"),
        ({"words": {"sentence": ["a", "b"]}}, r"jsonl:1: 'sentence': must be a number"),
    ],
)
def test_a_source_that_does_not_fit_its_file_is_refused(files, changes, message):
    data = section([classification(files, **changes)])
    with pytest.raises(DataError, match=message):
        rows(data.train[0], data)
