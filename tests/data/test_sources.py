"""Files and hub data sets as rows: kinds of files, fields, limits and what is damaged."""

import gzip
import json

import pytest

from moe_finetune.data.row_forms import Former
from moe_finetune.data.sources import draw, read_rows
from moe_finetune.errors import DataError
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.recipe.sections import DataSection
from tests.data.loading import CHAT, load_dataset_for, prepare, texts
from tests.support import tiny


def test_every_kind_of_file_gives_the_same_rows(tmp_path, write):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    rows = [{"prompt": f"p{i}, ü", "completion": f'c{i} "q"\nnext'} for i in range(5)]
    write("a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    Dataset.from_list(rows).to_csv(str(tmp_path / "e.csv"))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    for part in (0, 1):
        half = rows[:2] if part == 0 else rows[2:]
        (tmp_path / "folder" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, half)))
    names = ["a.jsonl", "b.json", "c.jsonl.gz", "d.parquet", "e.csv", "saved", "folder"]
    for name in names:
        assert [row for _, row in read_rows(str(tmp_path / name))] == rows, name
    places = [place for place, _ in read_rows(str(tmp_path / "a.jsonl"))]
    assert places[2].endswith("a.jsonl:3")


def test_damaged_and_missing_files(tmp_path, tokenizer):
    def load(name):
        load_dataset_for(DataSection(train=str(tmp_path / name)), tokenizer, 0)

    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff\xfe"}')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 99)[:-9])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and nothing")
    (tmp_path / "short.csv").write_text("prompt,completion\na,b\nc\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.docx").write_text("x")
    for name, said in {
        "bytes.jsonl": "not UTF-8",
        "cut.jsonl.gz": "not a complete gzip",
        "cut.parquet": "not a complete Parquet",
        "short.csv": r"short\.csv:3: must have 2 fields",
        "empty": "has no files of type",
        "notes.docx": "unknown file type; it must be one of",
        "gone.jsonl": "no data file or folder",
    }.items():
        with pytest.raises(DataError, match=said):
            load(name)
    with pytest.raises(DataError, match="and it cannot be loaded as a hub dataset"):
        load_dataset_for(DataSection(train="nobody/nothing"), tokenizer, 0)


def test_columns_template_and_known_layouts():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    columns = Former(columns={"prompt": "instruction", "completion": "output"})
    assert columns("f:1", row) == {"prompt": "Add.", "completion": "3"}
    template = Former(template={"prompt": "{instruction} [{input}]{{}}", "completion": " {output}"})
    assert template("f:1", row) == {"prompt": "Add. [1 2]{}", "completion": " 3"}
    gsm = Former()("f:1", {"question": "Why?", "answer": "So. #### 3"})
    assert gsm == {"prompt": "Question: Why?\nAnswer:", "completion": " So. #### 3"}
    chat = Former("messages")("f:1", {"prompt": "a", "completion": "b"})
    assert [turn["role"] for turn in chat["messages"]] == ["user", "assistant"]
    shared = Former(columns={"messages": "conversations"})
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert shared("f:1", {"conversations": turns}) == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }


def test_a_list_of_texts_is_filled_in_with_one_a_line():
    former = Former(template={"prompt": "{task}\n{tests}\n[BEGIN]", "completion": "{code}"})
    row = {"task": "add", "tests": ["assert f(1, 2) == 3", "assert f(0, 4) == 4"], "code": "def f"}
    assert former("a:1", row) == {
        "prompt": "add\nassert f(1, 2) == 3\nassert f(0, 4) == 4\n[BEGIN]",
        "completion": "def f",
    }


def test_a_limit_draws_from_all_rows_by_the_seed(write, tokenizer):
    a, b = (
        write("a.jsonl", texts(40)),
        write("b.jsonl", [{"text": f"B{chr(97 + i)}"} for i in range(26)]),
    )

    def drawn(seed, sources, **options):
        section = DataSection(train=sources, **options)
        kept = prepare(section.train, section, tokenizer, "train", seed)
        return [tokenizer.decode(row[:2]) for row in kept["input_ids"]]

    first = drawn(1, [a, b], limit=20)
    assert first == drawn(1, [a, b], limit=20) != drawn(2, [a, b], limit=20)
    from_b = [text for text in first if text.startswith("B")]
    assert 3 <= len(from_b) <= 14 and first[-len(from_b) :] == from_b, "in the files' order"
    own = drawn(1, [{"path": a, "limit": 6}, {"path": b, "limit": 5}])
    assert [text.startswith("B") for text in own] == [False] * 6 + [True] * 5
    assert own[:6] != [f"{i:02d}" for i in range(6)] and len(set(own)) == len(own)
    twice = drawn(1, [{"path": a, "limit": 6}, {"path": a, "limit": 6}])
    assert twice[:6] != twice[6:], "each source has a draw of its own"


def test_every_row_is_as_likely_as_any_other():
    rows = [(f"f:{i}", {"text": str(i)}) for i in range(9)]
    taken = [0] * 9
    for seed in range(2000):
        kept = [int(row["text"]) for _, row in draw(iter(rows), 4, seed, "limit")]
        assert kept == sorted(kept)
        for i in kept:
            taken[i] += 1
    # Each is taken 2000 x 4/9 = 889 times, give or take 22 (one standard deviation).
    assert all(abs(count - 889) < 100 for count in taken), taken


def test_a_limit_that_cannot_be_met_is_refused_for_training_alone(write, tokenizer):
    source = write("t.jsonl", texts(7))
    with pytest.raises(DataError, match=r"data\.limit of data\.train: is 8.* only 7 rows; lower"):
        load_dataset_for(DataSection(train=source, limit=8), tokenizer, 0)
    short = DataSection(train=[{"path": source, "limit": 9}])
    with pytest.raises(DataError, match=r"t\.jsonl \(data limit\): is 9, but.* only 7"):
        load_dataset_for(short, tokenizer, 0)
    held = write("v.jsonl", [{"text": f"v{i}"} for i in range(4)])
    section = DataSection(train=source, validation=held, limit=5)
    assert [len(part) for part in load_dataset_for(section, tokenizer, 0)] == [5, 4]
    section = DataSection(train=source, validation=held, limit=3)
    kept = [load_dataset_for(section, tokenizer, seed) for seed in (0, 1, 2)]
    assert len({str(train.to_list()) for train, _ in kept}) == 3
    assert len({str(validation.to_list()) for _, validation in kept}) == 1


def test_several_sources_of_different_forms_and_validation(write, tokenizer):
    a = write("a.jsonl", [{"text": "A"}])
    b = write("b.jsonl", [{"messages": CHAT}])
    held = write(
        "v.jsonl", [{"prompt": "x", "completion": "y"}, {"prompt": "z", "completion": "w"}]
    )
    train, validation = load_dataset_for(DataSection(train=[a, b], validation=held), tokenizer, 0)
    assert train.column_names == ["input_ids", "labels"] and len(train) == 2
    assert [tokenizer.decode(ids[:1]) for ids in validation["input_ids"]] == ["x", "z"]


def test_a_column_that_nothing_reads_may_have_no_number(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "hi", "score": NaN}\n{"text": "lo", "score": 1.5}\n')
    rows, _ = load_dataset_for(DataSection(train=str(file)), tiny.tokenizer(), 0)
    assert len(rows) == 2
    template = {"prompt": "{text}", "completion": "{score}"}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*'score': is nan"):
        load_dataset_for(DataSection(train=str(file), template=template), tiny.tokenizer(), 0)
    file.write_text('{"text": NaN}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'text': must be text"):
        load_dataset_for(DataSection(train=str(file)), tiny.tokenizer(), 0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("r.csv", '"text";"n"\n"hi";1\n', r"r\.csv:1: columns are separated by ';'; .*sep=';'"),
        ("r.csv", "text\tn\nhi\t1\n", r"r\.csv:1: columns are separated by '\\t'"),
        ("r.json", '{"data": [{"text": "hi"}]}', "The rows are inside 'data': write that list"),
        ("r.json", '{\n "text": "hi"\n}\n{\n "text": "lo"\n}\n', "each in a line of its own"),
        ("r.jsonl", '{"dialogue": [{"from": "human", "value": "hi"}]}', "={messages: dialogue}"),
        ("r.jsonl", '{"ask": "hi", "reply": "lo"}', "={prompt: ask, completion: reply}"),
        ("r.jsonl", '{"body": "hi"}', "={text: body}"),
    ],
)
def test_a_layout_that_is_not_read_names_its_own_remedy(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        load_dataset_for(DataSection(train=str(tmp_path / name)), tiny.tokenizer(), 0)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_may_be_json_text(tmp_path, column):
    """As in many Parquet files, where a table would give all objects one's fields."""
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Lo."}]
    rows = []
    for name, value in (("text", json.dumps(turns)), ("list", turns)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{column: value}])
        data = DataSection(train=str(tmp_path / f"{name}.jsonl"), chat_template="chatml")
        rows.append(load_dataset_for(data, tiny.tokenizer(), 0)[0][0])
    assert rows[0] == rows[1] and rows[0]["input_ids"]
    write_jsonl(tmp_path / "odd.jsonl", [{column: "[{'role': 'user'}]"}])
    with pytest.raises(DataError, match=r"odd\.jsonl:1: 'messages': not JSON"):
        data = DataSection(train=str(tmp_path / "odd.jsonl"), chat_template="chatml")
        load_dataset_for(data, tiny.tokenizer(), 0)


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,source\nhi," + "x" * 150_000 + "\n")
    (row,) = (row for _, row in read_rows(str(file)))
    assert len(row["source"]) == 150_000
