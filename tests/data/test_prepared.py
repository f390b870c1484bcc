"""Prepared data: made once, known by their content, mapped from disk, whole or not there."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from moe_finetune.data import prepared_rows, token_rows
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from tests.data.loading import prepare
from tests.support import tiny
from tests.support.conversations import ASK, tokenizer_of

ROWS = [{"prompt": f"ask {i} " * (i + 1), "completion": f"say {i}"} for i in range(7)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def tokenized(monkeypatch):
    """How many rows have been tokenized so far."""
    real, count = token_rows.tokenize_row, []

    def counting(row, *args):
        count.append(row)
        return real(row, *args)

    monkeypatch.setattr(token_rows, "tokenize_row", counting)
    return lambda: len(count)


def prepared(source, tokenizer=None, seed=0, **options):
    section = DataSection(train=str(source), **options)
    return prepare(str(source), section, tokenizer or tiny.tokenizer(), "train", seed)


def test_a_second_time_nothing_is_read_or_tokenized(cache, source, tokenized, caplog):
    with caplog.at_level(logging.INFO, "moe_finetune"):
        first = prepared(source)
        assert tokenized() == len(ROWS) and "(prepared before)" not in caplog.text
        copy = source.with_name("copy.jsonl")
        copy.write_bytes(source.read_bytes())
        again = prepared(copy)
    assert tokenized() == len(ROWS) and first.to_list() == again.to_list()
    assert "7 rows" in caplog.text and "(prepared before)" in caplog.text
    prepared(source, seed=5)
    assert tokenized() == len(ROWS), "a seed decides the order alone, which is not part of it"


def test_whatever_changes_the_result_prepares_again(cache, source, tokenized):
    changed = tiny.tokenizer()
    changed.chat_template = "{{ messages }}"
    cases = [
        {},
        {"max_length": 9},
        {"completion_only_loss": False},
        {"template": {"text": "{prompt}"}},
        {"tokenizer": changed},
        {"limit": 6},
        {"limit": 6, "seed": 1},
    ]
    for number, case in enumerate(cases):
        before = tokenized()
        prepared(source, **case)
        assert tokenized() > before, f"case {number} was taken from the cache"
    before = tokenized()
    source.write_text(source.read_text().replace("say 3", "say 4"))  # same size, same name
    rows = prepared(source).to_list()
    assert tokenized() == before + len(ROWS)
    assert tiny.tokenizer().decode(rows[3]["input_ids"]).endswith("say 4<|endoftext|>")


def test_folders_count_with_all_their_files(cache, tmp_path, source, tokenized):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(source.read_bytes())
    prepared(folder)
    (folder / "b.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    assert len(prepared(folder)) == len(ROWS) + 1


def test_rows_are_mapped_from_disk_also_when_packed(cache, source, tmp_path):
    from trl import SFTConfig, SFTTrainer

    rows = prepared(source).shuffle(3, keep_in_memory=True)
    assert {Path(file["filename"]).parents[2] for file in rows.cache_files} == {cache / "data"}
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"), max_length=64, packing=True, report_to="none",
        use_cpu=True, bf16=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    for _ in range(2):
        trainer = SFTTrainer(
            tiny.model("olmoe"), args=arguments, train_dataset=rows,
            processing_class=tiny.tokenizer(),
        )  # fmt: skip
        files = [Path(file["filename"]) for file in trainer.train_dataset.cache_files]
        assert files and all(cache in file.parents for file in files)
    assert len(list(cache.rglob("cache-*.arrow"))) == 1, "packed twice"


def test_a_source_that_changes_meanwhile_is_not_kept_as_what_it_was(
    cache, source, tmp_path, monkeypatch
):
    """Else the rows of the new content would be found under the old content's name for ever."""
    other, before = tmp_path / "other.jsonl", source.read_text()
    other.write_text('{"prompt": "p", "completion": "c"}\n')
    real = prepared_rows.rows_of

    def edited(*args):
        source.write_text(before.replace("say 3", "say 4"))
        return real(*args)

    both = [str(other), str(source)]
    section = DataSection(train=both)
    with monkeypatch.context() as meanwhile, pytest.raises(DataError, match=r"rows\.jsonl changed"):
        meanwhile.setattr(prepared_rows, "rows_of", edited)
        prepare(both, section, tiny.tokenizer(), "train")
    assert not list(cache.rglob("*.arrow"))
    source.write_text(before)
    rows = prepare(both, section, tiny.tokenizer(), "train").to_list()
    assert tiny.tokenizer().decode(rows[4]["input_ids"]).endswith("say 3<|endoftext|>")


def test_what_fails_leaves_nothing(cache, source, tokenized, monkeypatch):
    text = source.read_text()
    source.write_text(text + '{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:8"):
        prepared(source)
    assert not cache.exists()
    source.write_text(text)
    assert len(prepared(source)) == len(ROWS)


def test_numbers_of_calls_are_as_the_row_has_them(cache, tmp_path):
    numbers = {"large": 2**70, "small": 1e-320, "exact": 0.1 + 0.2, "whole": 1.0, "none": None}
    call = {"type": "function", "function": {"name": "f", "arguments": numbers}}
    turns = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    text = tokenizer.decode(prepared(file, tokenizer)[0]["input_ids"])
    assert json.dumps(numbers) in text


def test_a_number_that_no_template_writes_is_refused_with_its_line(cache, tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": float("nan")}}}
    turns = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match=r"calls\.jsonl:1: a value is neither text nor a number"):
        prepared(file, tokenizer_of("qwen3_instruct_2507"))


def test_a_killed_preparation_is_made_again(cache, source):
    rows = prepared(source)
    expected, folder = rows.to_list(), Path(rows.cache_files[0]["filename"]).parents[1]
    for damage in (folder / "counts.json", folder / "rows" / "prepared.arrow"):
        damage.unlink()
        (folder / "counts.json").unlink(missing_ok=True)  # it is written last
        folder.with_name(f".{folder.name}.partial-0123abcd").mkdir()
        assert prepared(source).to_list() == expected
        assert list(folder.parent.iterdir()) == [folder]


def test_of_two_processes_one_prepares(warm, cache, source):
    command = [sys.executable, "-m", "tests.data.prepare_one", str(source)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert [out.strip() for out, _ in said] == ["7", "7"], said
    assert sorted("(prepared before)" in err for _, err in said) == [False, True]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be stored in .*file/data .*MOE_FINETUNE_CACHE"):
        prepared(source)
