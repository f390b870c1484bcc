"""The strict readers of JSON, YAML and lines: what is refused, by line, and what is not."""

import json

import pytest

from moe_finetune.data.sources import read_rows
from moe_finetune.errors import DataError
from moe_finetune.io.json_file import JsonError, parse_items, parse_json, read_object
from moe_finetune.io.row_files import read_rows as read_task_rows
from moe_finetune.io.yaml_file import YamlError, parse_yaml

# Nine levels of nine aliases, and 26 levels of two merged mappings, under 1 KB of text each.
BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 27)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n "a": 2}', "the key 'a' occurs twice"),
        ('{"a": {"b": [{"c": 1, "c": 1}]}}', "the key 'c' occurs twice"),
        ("[1e999]", "1e999 is not a finite number"),
        ("[-1e999]", "not a finite number"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        (f"[{'7' * 5000}]", "not JSON (Exceeds the limit"),
        (r'{"a": "\ud800"}', "surrogate"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        (b"\xff[]", "not UTF-8 at byte 0"),
        ("[1,\n2\n3]", "line 3: not JSON"),
        ("", "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(text, problem):
    with pytest.raises(JsonError) as caught:
        parse_json(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "items", "problem"),
    [
        ("[]", [], None),
        (" [ ]\n", [], None),
        ('[{"a": [1]}]', [{"a": [1]}], None),
        ('\t[1 ,\n"]" , {}\r\n] ', [1, "]", {}], None),
        ("[1,\n2\n3]", [1, 2], "line 3: not JSON"),
        ("[1,\n2,\n]", [1, 2], "line 3: not JSON"),
        ("[1\n", [1], "line 2: not JSON"),
        ("[\n", [], "line 2: not JSON"),
        ("[,1]", [], "line 1: not JSON"),
        ("[1, 2]\n[3]", [1, 2], "line 2: not JSON (Extra data)"),
        ("[] x", [], "line 1: not JSON (Extra data)"),
        ('{"a": 1}', [], "line 1: not JSON"),
        ('[1, {"a": 1, "a": 2}]', [1], "the key 'a' occurs twice"),
        ("[7, 1e999]", [7], "1e999 is not a finite number"),
        (r'["a", "\ud800", 3]', ["a"], "surrogate"),
        ("[3, " + "[" * 100_000 + "]" * 100_001, [3], "nested too deep"),
    ],
)
def test_a_list_is_read_item_by_item_as_strictly(text, items, problem):
    read, got = parse_items(text), []
    if problem is None:
        assert list(read) == items == parse_json(text)
        return
    with pytest.raises(JsonError) as caught:
        got.extend(read)
    assert got == items and problem in str(caught.value)
    with pytest.raises(JsonError):
        parse_json(text) if text[0] == "[" else list(parse_items(text))


def test_the_first_row_of_a_list_is_read_without_the_others(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[{"text": "a"},\n {"text": "b"},\n {"text" "c"}, {"text": 1, "text": 2}]')
    rows = read_rows(str(file))
    assert [next(rows), next(rows)] == [
        (f"{file}: row 1", {"text": "a"}),
        (f"{file}: row 2", {"text": "b"}),
    ]
    with pytest.raises(DataError, match=r"rows\.json:3: not JSON"):
        next(rows)
    file.write_text('[{"text": "a"},\n {"text": 1, "text": 2}]')
    with pytest.raises(DataError, match=r"rows\.json: row 2: the key 'text' occurs twice"):
        list(read_rows(str(file)))


def test_good_json_is_what_python_reads():
    value = {
        "a": [1, -2.5, 1e-9, None, True, "ä \U0001f600"],
        "model_max_length": 1000000000000000019884624838656,
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
    with pytest.raises(DataError, match="contains list instead of an object; do this"):
        read_object(file, DataError, "do this")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 20_000, "nested too deep"),
        ("a: {b: 1, b: 2}", "a.b is set twice"),
        ("? [a, b]\n: 1", "a key must be a word"),
        ("a: 2026-99-99", "not YAML"),
        ("a: !!python/name:os.system x", "not YAML"),
        ("a: *nowhere", "not YAML"),
        ("a: &a [*a]", "an alias is inside the value that it refers to"),
        (BOMB, "has more than 100,000 values once aliases are expanded"),
        (MERGES, "has more than 100,000 values once aliases are expanded"),
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


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_separator_inside_a_text_ends_no_line(tmp_path, name):
    rows = [{"text": "one\u2028two\x85three"}, {"text": "five"}]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    assert [row for _, row in read_rows(str(tmp_path / name))] == rows


@pytest.mark.parametrize("read", [lambda file: list(read_rows(str(file))), read_task_rows])
def test_a_column_twice(tmp_path, read):
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer,answer\na,b,c\n")
    with pytest.raises(
        DataError, match=r"rows.csv:1: the column 'answer' occurs twice; rename one of them"
    ):
        read(file)


def test_numbers_are_those_of_yaml_1_2():
    value = parse_yaml("{a: 1:30, b: 1e-3, c: 0x10, d: -4, e: 1:30.5, f: '9:9', g: .5}")[1]
    assert value == {"a": "1:30", "b": 1e-3, "c": 16, "d": -4, "e": "1:30.5", "f": "9:9", "g": 0.5}
    with pytest.raises(YamlError) as refused:
        parse_yaml("a: " + "9:" * 2000 + "9\nb: [")
    assert len(str(refused.value)) < 300
