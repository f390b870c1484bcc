"""The demo's files: repeatable, well formed, with nothing of the held-out side in training."""

import ast
import json
import re
from pathlib import Path

import pytest

from moe_finetune.demo.arithmetic import is_held_out
from moe_finetune.demo.corpus import (
    _statements,
    library_folder,
    read_corpus,
    source_files,
    split_of,
)
from moe_finetune.demo.data import DataSizes, write_demo_data
from moe_finetune.demo.stage_data import write_stage_data
from moe_finetune.errors import DataError

SIZES = DataSizes(train=240, validation=32, arithmetic_test=50, cloze_test=30)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demo_data(tmp_path_factory.mktemp("demo"), seed=3, sizes=SIZES)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    repeated = write_demo_data(tmp_path / "again", seed=3, sizes=SIZES)
    other = write_demo_data(tmp_path / "other", seed=4, sizes=SIZES)
    for path in sorted(folder.iterdir()):
        assert (repeated / path.name).read_bytes() == path.read_bytes()
        assert (other / path.name).read_bytes() != path.read_bytes()


def test_rows_are_as_many_as_asked_and_domains_are_mixed(folder):
    for name, count in (("train.jsonl", 240), ("validation.jsonl", 32)):
        examples = rows(folder / name)
        domains = [row["domain"] for row in examples]
        assert [domains.count(d) for d in ("arithmetic", "code", "prose")] == [
            6 * count // 8,
            count // 8,
            count // 8,
        ]
        assert domains != sorted(domains)
        assert all(row["prompt"] and row["completion"].startswith(" ") for row in examples)
    assert len(rows(folder / "arithmetic_test.jsonl")) == 50


def test_validation_and_training_share_no_prompt(folder):
    training = {row["prompt"] for row in rows(folder / "train.jsonl")}
    validation = {row["prompt"] for row in rows(folder / "validation.jsonl")}
    assert len(training) == 240 and len(validation) == 32 and not training & validation


def test_arithmetic_facts_are_on_their_side(folder):
    def held_out(question: str, answer: int) -> bool:
        first, second = map(int, re.findall(r"\d+", question))
        addends = (first, second) if first + second == answer else (second, answer)
        assert answer == first + second or answer == first - second
        return is_held_out(*addends)

    for row in rows(folder / "arithmetic_test.jsonl"):
        assert held_out(row["question"], int(row["answer"]))
    for name in ("train.jsonl", "validation.jsonl"):
        for row in rows(folder / name):
            if row["domain"] == "arithmetic":
                assert not held_out(row["prompt"], int(row["completion"]))


@pytest.mark.parametrize("domain", ["code", "prose"])
def test_the_marked_choice_is_how_a_held_out_document_goes_on(folder, corpus, domain):
    texts = [d.text for d in corpus if d.domain == domain and d.split == "heldout"]
    answers = set()
    for row in rows(folder / f"{domain}_test.jsonl"):
        assert len(set(row["choices"])) == 4
        assert len({tuple(sorted(choice.split())) for choice in row["choices"]}) == 1
        assert len({len(choice) for choice in row["choices"]}) == 1
        goes_on = [
            any(f"{row['question']} {choice}" in text for text in texts)
            for choice in row["choices"]
        ]
        assert goes_on.index(True) == row["answer"] and sum(goes_on) == 1
        answers.add(row["answer"])
    assert answers == {0, 1, 2, 3}


def test_documents_keep_their_split_and_code_has_no_docstrings(corpus):
    names = [document.name for document in corpus]
    assert len(set(names)) == len(names)
    by_name = {document.name: document for document in corpus}
    for document in corpus:
        module = document.name.removesuffix(":docstrings")
        assert document.split == split_of(module)
        if module in by_name:
            assert by_name[module].split == document.split
    textwrap = by_name["textwrap.py"], by_name["textwrap.py:docstrings"]
    assert "class TextWrapper" in textwrap[0].text
    assert "Fill a single paragraph of text" not in textwrap[0].text
    assert "Fill a single paragraph of text" in textwrap[1].text
    assert by_name["topic:lambda"].domain == "prose"


def test_a_library_without_source_is_refused(tmp_path):
    with pytest.raises(DataError, match="no standard-library source"):
        read_corpus(tmp_path)


def test_the_stages_data_prefer_right_answers(tmp_path):
    folders = [write_stage_data(tmp_path / name, rows=60) for name in ("a", "b")]
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == ["preferences.jsonl", "prompts.jsonl", "prompts_test.jsonl", "texts.jsonl"]
    for name in files:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()

    def right(prompt: str, answer: str) -> bool:
        first, second = map(int, re.findall(r"\d+", prompt))
        return int(answer) in (first + second, first - second)

    for row in rows(folders[0] / "preferences.jsonl"):
        assert right(row["prompt"], row["chosen"]) and row["chosen"] != row["rejected"]
        assert len(row["chosen"]) == len(row["rejected"])
    prompts = {row["prompt"] for row in rows(folders[0] / "prompts.jsonl")}
    held_out = [row["prompt"] for row in rows(folders[0] / "prompts_test.jsonl")]
    assert not prompts & set(held_out)
    for prompt in held_out:
        first, second = map(int, re.findall(r"\d+", prompt))
        assert is_held_out(first, second) or is_held_out(first - second, second)


def test_definitions_are_found_in_the_order_of_the_tree():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in list(source_files(library_folder()))[::9]:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        walked = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        assert [node for node in _statements(tree) if isinstance(node, kinds)] == walked, file
