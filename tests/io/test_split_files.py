import json
import logging

import pytest

from moe_finetune.errors import DataError
from moe_finetune.io.split_files import files_of
from moe_finetune.recipe.sections import DataSection
from tests.data.loading import load_dataset_for
from tests.support import tiny


def folder_with(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"prompt": f"{name} ", "completion": "x"}
        path.write_text(name if path.suffix == ".txt" else json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train.jsonl", "test.jsonl", "validation.jsonl"], "train", ["train.jsonl"]),
        (["train.jsonl", "dev.jsonl", "notes.txt"], "validation", ["dev.jsonl"]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-0.jsonl"], "train",
         ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]),
        (["a.jsonl", "latest.jsonl", "contest.jsonl"], "train",
         ["a.jsonl", "contest.jsonl", "latest.jsonl"]),
        (["mine.jsonl", "my_test.jsonl"], "train", ["mine.jsonl"]),
        (["a.jsonl", "b.jsonl"], "validation", ["a.jsonl", "b.jsonl"]),
        (["data/train.jsonl", "data/test.jsonl", "README.md"], "train", ["train.jsonl"]),
        (["train.txt", "test.txt"], "train", ["train.txt"]),
        (["The test of time.txt", "Dev stories.txt"], "train",
         ["Dev stories.txt", "The test of time.txt"]),
        (["train.jsonl", "dataset_infos.json"], "train", ["train.jsonl"]),
    ],
)  # fmt: skip
def test_files_are_of_a_split_by_the_words_in_their_names(tmp_path, names, split, expected):
    folder = folder_with(tmp_path, *names)
    assert [path.name for path in files_of(folder, split)] == expected


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (["train.jsonl", "more.jsonl"], "train", r"have no split \(more\.jsonl\); list"),
        (["test.jsonl", "validation.jsonl"], "train", "has no files for 'train', only test.jsonl"),
        (["train.jsonl", "mine.jsonl"], "validation", "has no files for 'validation'"),
        (["train_test.jsonl"], "train", r"words of two splits \(train and test\)"),
        (["a.jsonl", "data/b.jsonl"], "train", "and so has its folder 'data'"),
        (["main/train.jsonl", "socratic/train.jsonl"], "train", "its folders: main, socratic"),
        (["README.md"], "train", "has no files of type"),
        ([f"train-{i}.jsonl" for i in range(5)], "validation",
         r"0\.jsonl, .*-3\.jsonl, train-4\.jsonl; list"),
        ([f"train-{i}.jsonl" for i in range(6)], "validation",
         r"0\.jsonl, .*-3\.jsonl and 2 more; list"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_refused(tmp_path, names, split, message):
    with pytest.raises(DataError, match=message):
        files_of(folder_with(tmp_path, *names), split)


def test_a_folder_trains_on_its_training_files_and_validates_on_its_validation_files(
    tmp_path, caplog
):
    names = "train.jsonl", "validation.jsonl", "test.jsonl"
    folder = str(folder_with(tmp_path / "rows", *names))
    caplog.set_level(logging.INFO, "moe_finetune")
    section = DataSection(train=folder)
    train, validation = load_dataset_for(section, tiny.tokenizer(), 0)
    decode = tiny.tokenizer().decode
    assert [decode(row["input_ids"])[:6] for row in train] == ["train."]
    assert [decode(row["input_ids"])[:6] for row in validation] == ["valida"]
    assert f"{folder}: train.jsonl (not read: test.jsonl, validation.jsonl)" in caplog.text
    assert DataSection(**section.model_dump()) == section, "a saved recipe names them"
    named = DataSection(train=folder, validation=f"{folder}/test.jsonl")
    assert named.validation == f"{folder}/test.jsonl"
    other = DataSection(train=f"{folder}/train.jsonl", validation=folder).validation
    assert [(source.path, source.split) for source in other] == [(folder, "validation")]
    assert DataSection(train=[f"{folder}/train.jsonl"]).validation is None
