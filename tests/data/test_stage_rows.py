"""Rows of DPO and GRPO: in every layout as before, made once, from a stream, and kept apart."""

import json
import tracemalloc
from datetime import datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from moe_finetune.data import preference_and_prompt_rows
from moe_finetune.data.load_rows import load_examples, load_stage_rows
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.recipe.stages import STAGES
from tests.data.stage_layouts import GOLDEN, LAYOUTS, NO, TURNS, as_plain, load, texts
from tests.support import tiny
from tests.support.conversations import ASK, YES, tokenizer_of

SEVERAL = ("malformed", "some_tools", "odd_columns_of_prompts")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def prepared(monkeypatch):
    """How many rows have been prepared so far."""
    kind, count = preference_and_prompt_rows.StageRows, []
    real = kind.prepare

    def counting(self, location, row):
        count.append(location)
        return real(self, location, row)

    monkeypatch.setattr(kind, "prepare", counting)
    return lambda: len(count)


def write(file: Path, rows) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("name", "processes"), [*((name, None) for name in LAYOUTS), *((name, 2) for name in SEVERAL)]
)
def test_rows_are_those_of_a_table_in_memory(name, processes, cache, tmp_path):
    examples = load(LAYOUTS[name], tmp_path, load_stage_rows, num_proc=processes)
    assert as_plain(examples) == json.loads(GOLDEN.read_text())[name]
    files = [Path(file["filename"]) for file in examples.train.cache_files]
    assert len(files) == (processes or 1) and all(cache in file.parents for file in files)


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_rows_are_prepared_once_unless_something_changes(stage, cache, tmp_path, prepared, caplog):
    file = write(tmp_path / "rows.jsonl", texts(5))
    changed = tiny.tokenizer()
    changed.chat_template = "{{ messages }}"
    split = tiny.tokenizer()
    split.split_special_tokens = True
    copy = write(tmp_path / "copy.jsonl", texts(5))

    def prepares(tokenizer=None, room=4, rewards=("exact_match",), name=stage, **options):
        before, section = prepared(), {"train": file, "max_length": 96, **options}
        load_stage_rows(
            STAGES[name], DataSection(**section), tokenizer or tiny.tokenizer(), 3, room, rewards
        )
        return prepared() > before

    assert prepares() and "(prepared before)" not in caplog.text
    with caplog.at_level("INFO", "moe_finetune"):
        assert not prepares() and not prepares(train=copy)
    assert "5 rows of prompt" in caplog.text and "(prepared before)" in caplog.text
    assert prepares(name="grpo" if stage == "dpo" else "dpo"), "another stage's rows"
    assert prepares(tokenizer=changed) and prepares(tokenizer=split)
    assert prepares(max_length=90) and prepares(room=5) and prepares(rewards=(None,))
    assert prepares(overlong="drop") and prepares(limit=4)
    write(tmp_path / "rows.jsonl", [*texts(4), {**texts(5)[4], "chosen": " 9"}])
    assert prepares()


def test_rows_of_sft_and_of_prompts_stay_apart(cache, tmp_path):
    """Both read "prompt" of the same file."""
    rows = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(3)]
    data = DataSection(train=write(tmp_path / "rows.jsonl", rows))
    tokenizer = tiny.tokenizer()
    learned = load_examples(data, tokenizer, 3).train
    asked = load_stage_rows(STAGES["grpo"], data, tokenizer, 3).train
    assert {*learned.column_names} == {"input_ids", "labels"}
    assert {*asked.column_names} == {"prompt", "completion"}
    assert len(list(cache.iterdir())) == 2


def test_special_tokens_as_text_are_prepared_anew_for_sft(cache, tmp_path):
    """tokenizer.json is the same, whether "<|endoftext|>" in a text is one token or 13."""
    data = DataSection(train=write(tmp_path / "rows.jsonl", [{"text": "a<|endoftext|>b"}]))
    lengths = []
    for split in (False, True):
        tokenizer = tiny.tokenizer()
        tokenizer.split_special_tokens = split
        lengths.append(len(load_examples(data, tokenizer, 3).train[0]["input_ids"]))
    assert lengths == [4, 16]


def test_memory_does_not_grow_with_the_rows(cache, tmp_path):
    """A list of the 4,000 more would take 24 MB; a thousand at a time are written to disk."""
    peaks = []
    for count in (10, 2000, 6000):  # the first one imports what is needed
        file = tmp_path / "rows.jsonl"
        with file.open("w") as lines:
            for n in range(count):
                lines.write(json.dumps({"prompt": f"{n}", "note": f"{n:04d}" * 1500}) + "\n")
        data = DataSection(train=str(file), max_length=96)
        tracemalloc.start()
        try:
            examples = load_stage_rows(STAGES["grpo"], data, tiny.tokenizer(), 3, 0, [None])
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(examples.train) == count
    assert peaks[2] < peaks[1] + 8e6


@pytest.mark.parametrize("first", ["texts", "turns"])
def test_answers_end_in_texts_beside_turns(first, cache, tmp_path):
    """TRL looks at a table's first row alone, and ended no text behind a row of turns."""
    kinds = {"texts": texts(2), "turns": [TURNS, TURNS]}
    files = [write(tmp_path / f"{kind}.jsonl", rows) for kind, rows in kinds.items()]
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    data = DataSection(train=files if first == "texts" else files[::-1])
    train = load_stage_rows(STAGES["dpo"], data, tokenizer, 3).train
    ends = {tokenizer.decode(row["chosen_ids"]) for row in train}
    assert ends == {" 1<|endoftext|>", " 2<|endoftext|>", "Yes.<|im_end|>\n"}


def test_a_column_that_only_later_rows_have_is_kept_as_it_is(cache, tmp_path):
    """Numbers that are texts stay texts, also in a column with numbers."""
    rows = [{"prompt": "42"}, {"prompt": "a", "id": "7"}, {"prompt": [ASK], "id": 7}]
    data = DataSection(train=write(tmp_path / "rows.jsonl", rows))
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    rows = load_stage_rows(STAGES["grpo"], data, tokenizer, 3).train.to_list()
    by_prompt = {str(row["prompt"]): row for row in rows}
    assert by_prompt["42"] == {"prompt": "42", "id": None}
    assert by_prompt["a"]["id"] == "7" and by_prompt[str([ASK])]["id"] == 7


def test_numbers_of_a_call_reach_the_tokens_of_dpo(cache, tmp_path):
    numbers = {"large": 2**60 + 1, "exact": 0.1 + 0.2}
    call = {"type": "function", "function": {"name": "f", "arguments": numbers}}
    asked = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK]
    rows = [{"prompt": asked, "chosen": [YES], "rejected": [NO]}]
    data = DataSection(train=write(tmp_path / "rows.jsonl", rows))
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    row = load_stage_rows(STAGES["dpo"], data, tokenizer, 3).train[0]
    assert json.dumps(numbers) in tokenizer.decode(row["prompt_ids"])


def test_dates_of_a_table_reach_a_reward(cache, tmp_path):
    day = datetime(2026, 11, 28)
    table = pyarrow.table({"prompt": ["a", "b"], "day": [day, None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = DataSection(train=str(tmp_path / "rows.parquet"))
    train = load_stage_rows(STAGES["grpo"], data, tiny.tokenizer(), 3, 4, [None]).train
    assert {row["prompt"]: row["day"] for row in train} == {"a": day, "b": None}


@pytest.mark.parametrize("processes", [None, 2])
def test_what_tokens_show_is_refused_with_the_row(processes, cache, tmp_path):
    rows = [TURNS, TURNS, {**TURNS, "chosen": [{**YES, "thinking": "So."}]}, TURNS]
    data = DataSection(train=write(tmp_path / "rows.jsonl", rows), num_proc=processes)
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: turn 1: 'thinking'.*malformed: drop"):
        load_stage_rows(STAGES["dpo"], data, tokenizer, 3)
    write(tmp_path / "rows.jsonl", [TURNS, {**TURNS, "rejected": [{**NO, "content": "No. " * 40}]}])
    data = data.model_copy(update={"overlong": "error", "max_length": 60})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: \d+ tokens, .* truncate or drop"):
        load_stage_rows(STAGES["dpo"], data, tokenizer, 3)
    assert not cache.exists()
