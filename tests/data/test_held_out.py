"""A share of the training rows held out for validation, in every stage."""

import itertools
import json

import pytest
from pydantic import ValidationError

from moe_finetune.data.held_out import HeldOut, warn_of_few
from moe_finetune.data.load_rows import load_examples, load_stage_rows
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.recipe.stages import STAGES
from tests.support import tiny


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair(n):
    return {"prompt": f"{n} and", "chosen": f" {n + 1}", "rejected": f" {n + 2}", "answer": f"{n}"}


def sides(path, stage="sft", seed=3, share=0.1, **options):
    """The texts of training and of validation rows."""
    tokenizer, data = tiny.tokenizer(), DataSection(train=path, validation=share, **options)
    if STAGES[stage].form == "tokens":
        loaded = load_examples(data, tokenizer, seed)
        parts = (loaded.train["input_ids"], loaded.validation["input_ids"])
        return [sorted(tokenizer.decode(ids) for ids in part) for part in parts]
    loaded = load_stage_rows(STAGES[stage], data, tokenizer, seed, 4, ["exact_match"])
    return [sorted(part["prompt"]) for part in (loaded.train, loaded.validation)]


@pytest.mark.parametrize("stage", ["sft", "pretrain", "dpo", "grpo"])
def test_every_stage_holds_rows_out(tmp_path, stage):
    rows = [pair(n) | {"noise": n} for n in range(200)]
    if stage in ("sft", "pretrain"):
        rows = [{"text": f"row {n} of the file", "noise": n} for n in range(200)]
    path = write(tmp_path / "rows.jsonl", [*rows, *rows[:40]])
    train, held = sides(path, stage)
    assert len(train) + len(held) == 240 and 10 <= len(set(held)) <= 35
    assert not set(train) & set(held), "equal rows are on one side"
    assert sides(path, stage) == [train, held] and sides(path, stage, seed=4)[1] != held
    # Fields that nothing reads decide nothing, and neither does the order.
    changed = write(tmp_path / "changed.jsonl", [row | {"noise": 0} for row in rows[::-1]])
    assert set(sides(changed, stage)[1]) == set(held)


def test_a_row_keeps_its_side_when_the_file_grows(tmp_path):
    texts = [{"text": f"row {n} of the file"} for n in range(300)]
    held = [
        set(sides(write(tmp_path / f"{count}.jsonl", texts[:count]))[1])
        for count in (2, 3, 30, 150, 300)
    ]
    boundary = int(0.1 * 2**64)
    split = HeldOut(0.1, 3)
    for smaller, larger in itertools.pairwise(held):
        moved = smaller - larger
        assert len(moved) <= 1 and all(split.number({"text": t}) > boundary for t in moved)
    assert held[0] and len(held[-1]) > 15


def test_one_row_stays_in_training(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": f"row {n}"} for n in range(4)])
    train, held = sides(path, share=0.999999)
    assert len(train) == 1 and len(held) == 3
    train, held = sides(path, share=1e-6)  # into which no row falls
    number = HeldOut(1e-6, 3).number
    smallest = min((f"row {n}" for n in range(4)), key=lambda text: number({"text": text}))
    assert [text.startswith(smallest) for text in (*held, *train)] == [True, *[False] * 3]
    same = write(tmp_path / "same.jsonl", [{"text": "row"}] * 4)
    with pytest.raises(DataError, match=r"data\.validation: 0\.1: .* no two different rows"):
        sides(same)


def test_packed_rows_and_limits_hold_out_the_same_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": f"row {n} of it"} for n in range(120)])
    train, held = sides(path)
    assert sides(path, packing=True, max_length=64) == [train, held]
    some, few = sides(path, limit=50)
    assert len(some) == 50 and set(some) <= set(train) and set(few) <= set(held)


def test_validation_files_of_a_folder_lose_to_the_key(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", [{"text": f"row {n} of it"} for n in range(60)])
    write(folder / "validation.jsonl", [{"text": "another file"}])
    train, held = sides(str(folder))
    assert len(train) + len(held) == 60 and "another file" not in held


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, True])
def test_a_share_is_between_nothing_and_all(share):
    with pytest.raises(ValidationError, match=r"validation\n.*between 0 and 1, such as 0\.1"):
        DataSection(train="rows.jsonl", validation=share)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_few_rows_held_out_are_counted_in_a_warning(tmp_path, caplog, stage):
    """A tenth of 60 rows was 1 to 9 of them, by the seed, and nothing said so."""
    rows = [pair(n) if stage == "dpo" else {"text": f"row {n} of the file"} for n in range(60)]
    path = write(tmp_path / "rows.jsonl", rows)
    few = len(sides(path, stage)[1])
    assert f"data.validation: 0.1 holds out only {few} of 60 rows, so figures" in caplog.text
    caplog.clear()
    assert len(sides(path, stage, share=0.6)[1]) >= 20 and "holds out" not in caplog.text


@pytest.mark.parametrize(("held", "warned"), [(19, True), (20, False)])
def test_twenty_rows_are_enough_for_figures(caplog, held, warned):
    warn_of_few(DataSection(train="rows.jsonl", validation=0.1), 200, held)
    assert ("holds out only" in caplog.text) is warned
