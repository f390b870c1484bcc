"""The demo's rows: repeatable, well formed, with nothing of the held-out side in training."""

import json
import re
from pathlib import Path

import pytest

from eval.demo.arithmetic import is_held_out
from eval.demo.rows import write_rows
from eval.demo.text import read_documents, split_of

SIZES = {"train": 240, "validation": 32, "problems": 50, "passages": 30, "stages": 60}


@pytest.fixture(scope="module")
def corpus():
    return read_documents()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("demo")
    write_rows(made, seed=3, **SIZES)
    return made


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    write_rows(tmp_path / "again", seed=3, **SIZES)
    write_rows(tmp_path / "other", seed=4, **SIZES)
    for path in sorted(folder.iterdir()):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
        if path.name != "texts.jsonl":
            assert (tmp_path / "other" / path.name).read_bytes() != path.read_bytes()


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
    with pytest.raises(SystemExit, match="no standard-library source"):
        read_documents(tmp_path)


def test_the_stages_data_prefer_right_answers(folder):
    def right(prompt: str, answer: str) -> bool:
        first, second = map(int, re.findall(r"\d+", prompt))
        return int(answer) in (first + second, first - second)

    for row in rows(folder / "preferences.jsonl"):
        assert right(row["prompt"], row["chosen"]) and row["chosen"] != row["rejected"]
        assert len(row["chosen"]) == len(row["rejected"])
    prompts = {row["prompt"] for row in rows(folder / "prompts.jsonl")}
    held_out = [row["prompt"] for row in rows(folder / "prompts_test.jsonl")]
    assert not prompts & set(held_out)
    for prompt in held_out:
        first, second = map(int, re.findall(r"\d+", prompt))
        assert is_held_out(first, second) or is_held_out(first - second, second)
