"""The strict readers of JSON, YAML and lines: what is refused, by line, and what is not."""

from __future__ import annotations

import gzip
import json
import struct

import pytest

from moe_finetune.data.sources import read_rows
from moe_finetune.errors import CheckpointError, DataError, RecipeError
from moe_finetune.io.json_file import JsonError, parse_json, read_object
from moe_finetune.io.rows import read_rows as read_task_rows
from moe_finetune.io.rows import short_lines
from moe_finetune.io.safetensors_header import read_header
from moe_finetune.io.yaml_file import YamlError, parse_yaml
from moe_finetune.recipe.tree import load_tree


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n "a": 2}', "the key 'a' occurs twice"),
        ('{"a": {"b": [{"c": 1, "c": 1}]}}', "the key 'c' occurs twice"),
        ("[1e999]", "1e999 is not a finite number"),
        ("[-1e999]", "not a finite number"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        (f"[{'7' * 5000}]", "a whole number of 5000 digits"),
        (r'{"a": "\ud800"}', "surrogate"),
        (r'{"\udfff": 1}', "surrogate"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[" * 100_000 + "]" * 100_000, "nested more than 100 deep"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested more than 100 deep"),
        (b"\xff[]", "not UTF-8 at byte 0"),
        ("[1,\n2\n3]", "line 3: not JSON"),
        ("", "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(text, problem):
    with pytest.raises(JsonError) as caught:
        parse_json(text)
    assert problem in str(caught.value)


def test_good_json_is_what_python_reads():
    value = {
        "a": [1, -2.5, 1e-9, None, True, "ä \U0001f600"],
        "model_max_length": 1000000000000000019884624838656,
        "deep": json.loads("[" * 99 + "]" * 99),
    }
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json("[NaN, Infinity, 1e999]", finite=False)[1:] == [float("inf")] * 2


def test_a_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{\n"a": 1,\n}')
    with pytest.raises(DataError, match=r"x\.json:3: not JSON .*; do this"):
        read_object(file, DataError, "do this")
    file.write_text("[]")
    with pytest.raises(DataError, match="holds list instead of an object; do this"):
        read_object(file, DataError, "do this")


ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "m0: &m0 {k: v}\n" + "".join(
    f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIASES, "expands to more than"),
        (MERGES, "expands to more than"),
        ("a: &a [*a]", "an alias is inside the value that it refers to"),
        ("[" * 20_000, "nested more than"),
        ("[" * 200 + "]" * 200, "nested more than"),
        (f"a: {'7' * 5000}", "digits"),
        ('a: "\\ud800"', "surrogate"),
        ("a: {b: 1, b: 2}", "a.b is set twice"),
        ("? [a, b]\n: 1", "a key must be a word"),
        ("a: 2026-99-99", "not YAML"),
        ("a: !!python/name:os.system x", "not YAML"),
        ("a: *nowhere", "not YAML"),
        ("x" * (1 << 20) + "x", "KiB"),
    ],
)
def test_what_is_not_strict_yaml_is_refused(text, problem):
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert problem in str(caught.value)


def test_aliases_and_merge_keys_still_work():
    text = "base: &b {rank: 8, alpha: 1e-3}\nown: {<<: *b, rank: 4}\nagain: *b\n"
    assert parse_yaml(text)[1] == {
        "base": {"rank": 8, "alpha": 1e-3},
        "own": {"rank": 4, "alpha": 1e-3},
        "again": {"rank": 8, "alpha": 1e-3},
    }


def test_extends_that_multiplies_is_refused(tmp_path):
    (tmp_path / "r0.yaml").write_text("a: 1\n")
    for number in range(1, 30):
        below = f"r{number - 1}.yaml"
        (tmp_path / f"r{number}.yaml").write_text(f"extends: [{below}, {below}]\n")
    with pytest.raises(RecipeError, match="reads more than"):
        load_tree([tmp_path / "r29.yaml"])


@pytest.mark.parametrize("read", [lambda file: list(read_rows(str(file))), read_task_rows])
def test_a_line_of_gigabytes_in_a_small_gzip(tmp_path, monkeypatch, read):
    monkeypatch.setattr("moe_finetune.io.rows.MAX_LINE", 1000)
    file = tmp_path / "rows.jsonl.gz"
    line = '{"prompt": "p", "completion": "c"}\n'
    with gzip.open(file, "wt") as stream:
        stream.write(line * 3)
    assert len(read(file)) == 3
    with gzip.open(file, "wt") as stream:
        stream.write(line + '{"prompt": "' + "x" * 100_000 + '"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl.gz:2: .*more than"):
        read(file)


def test_short_lines_hold_no_more_than_one_piece(monkeypatch):
    monkeypatch.setattr("moe_finetune.io.rows.MAX_LINE", 10)

    class Endless:
        read = 0

        def readline(self, size):
            self.read += size
            return "x" * size

    stream = Endless()
    with pytest.raises(DataError):
        list(short_lines(stream, "f"))
    assert stream.read == 11


@pytest.mark.parametrize("read", [lambda file: list(read_rows(str(file))), read_task_rows])
def test_a_column_twice(tmp_path, read):
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer,answer\na,b,c\n")
    with pytest.raises(DataError, match=r"rows.csv:1: the column 'answer' is there twice"):
        read(file)


@pytest.mark.parametrize("read", [lambda file: list(read_rows(str(file))), read_task_rows])
def test_a_row_with_a_key_twice_or_too_deep(tmp_path, read):
    file = tmp_path / "rows.jsonl"
    for row, problem in (
        ('{"prompt": "a", "prompt": "b"}', "occurs twice"),
        ('{"prompt": ' + "[" * 9000 + "]" * 9000 + "}", "nested"),
    ):
        file.write_text(row + "\n")
        with pytest.raises(DataError, match=problem):
            read(file)


def test_a_million_empty_tensors_are_refused_at_once(tmp_path):
    empty = {
        f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(200_001)
    }
    text = json.dumps(empty, separators=(",", ":")).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="200,001 tensors, and at most 200,000 of a file"):
        read_header(file, CheckpointError)
