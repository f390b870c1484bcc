"""What rows become: layouts that are known by their fields, folders of texts, the preview."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from moe_finetune.data.row_forms import Former
from moe_finetune.data.sources import read_rows
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.preview import histogram, marked, preview
from moe_finetune.training.run.step_count import describe_steps
from tests.support import tiny


@pytest.mark.parametrize(
    ("form", "row", "made", "told"),
    [
        (
            "auto",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "ShareGPT",
        ),
        (
            "auto",
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            {"prompt": "Instruction: Add.\nInput: 1 2\nResponse:", "completion": " 3"},
            "Alpaca, wrapped as",
        ),
        (
            "auto",
            {"instruction": "Greet.", "input": "", "output": "Hi"},
            {"prompt": "Instruction: Greet.\nResponse:", "completion": " Hi"},
            "Alpaca, wrapped as",
        ),
        (
            "messages",
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            {
                "messages": [
                    {"role": "user", "content": "Add.\n\n1 2"},
                    {"role": "assistant", "content": "3"},
                ]
            },
            "Alpaca: instruction, input and output are read as",
        ),
        (
            "auto",
            {"question": "Why?", "answer": "So."},
            {"prompt": "Question: Why?\nAnswer:", "completion": " So."},
            "wrapped as 'Question: {question}",
        ),
        (
            "auto",
            {"question": "Question: Why?", "answer": "So."},
            {"prompt": "Question: Why?\nAnswer:", "completion": " So."},
            "wrapped as '{question}",
        ),
        ("auto", {"text": "a"}, {"text": "a"}, "text"),
    ],
)
def test_layouts_are_known_by_their_fields(form, row, made, told):
    former = Former(form)
    assert former("f:1", row) == made
    assert told in former.detected


def test_own_columns_come_first():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    former = Former("auto", {"prompt": "input", "completion": "output"})
    assert former("f:1", row) == {"prompt": "1 2", "completion": "3"}


def test_texts_of_a_folder_are_rows_unless_it_has_files_of_rows(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\ntext")
    (tmp_path / "a.txt").write_text("first")
    assert [row for _, row in read_rows(str(tmp_path))] == [
        {"text": "first"}, {"text": "second\n\ntext"},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    assert [row for _, row in read_rows(str(tmp_path))] == [{"text": "row"}]


def test_learned_tokens_are_marked():
    ids = tiny.tokenizer()("abcde")["input_ids"]
    labels = [-100, -100, ids[2], ids[3], -100]
    assert marked(ids, labels, tiny.tokenizer(), ("<", ">")) == "ab<cd>e"


def test_histogram_counts_every_row():
    text = histogram(np.array([3, 3, 4, 20, 7]))
    bars = text.splitlines()[1:]
    assert sum(int(line.split()[1]) for line in bars) == 5
    assert bars[0].split()[:2] == ["3–4", "3"] and bars[-1].split()[1] == "1"
    assert histogram(np.array([5, 5])).splitlines()[1].split()[:2] == ["5–5", "2"]


def test_preview_shows_rows_lengths_and_steps(tiny_checkpoint, tmp_path, caplog):
    rows = [{"question": f"What is {n}?", "answer": "x" * n} for n in range(1, 11)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"path": str(tiny_checkpoint("qwen3_moe"))},
        "data": {"train": str(tmp_path / "d.jsonl"), "max_length": 64},
        "trainer": {"per_device_train_batch_size": 3, "num_train_epochs": 2},
    }
    caplog.set_level("INFO", logger="moe_finetune")
    text = preview(recipe_from_tree(Tree(tree)), rows=2)
    assert "wrapped as 'Question: {question}\\nAnswer: {answer}'" in caplog.text
    assert text.count("\nQuestion: What is ") == 2 and text.count("Answer:⟦ x") == 2
    assert "train data: 10 rows, 356 tokens, " in caplog.text
    assert text.startswith("8 steps of 3 sequences, about 107 tokens a step\n")
    assert "longest 41" in text


@pytest.mark.parametrize(
    ("data", "extra", "rows", "tokens", "said"),
    [
        ({}, {}, 10, 700, "5 steps of 6 sequences, about 420 tokens a step"),
        ({}, {}, 4, 700, "5 steps of 4 sequences, about 700 tokens a step"),
        ({}, {"max_steps": 1}, 1, 70, "1 step of 1 sequence, about 70 tokens a step"),
        ({"packing": True, "max_length": 64}, {}, 10, 700,
         "about 5 steps of 6 packed sequences, about 384 tokens a step"),
        ({}, {}, 10, None, "5 steps of 6 rows"),
        ({}, {"num_generations": 3}, 10, None, "5 steps of 6 completions, 3 of a prompt"),
    ],
)  # fmt: skip
def test_what_a_step_takes(data, extra, rows, tokens, said):
    tree = Tree({"model": {"path": "m"}, "data": {"train": "d.jsonl", **data}})
    given = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 5}
    arguments = SimpleNamespace(**given | extra)
    assert describe_steps(recipe_from_tree(tree), arguments, rows, tokens) == said


def test_preview_of_preferences_shows_turns_as_the_model_sees_them(tiny_checkpoint, tmp_path):
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    row = {"prompt": [{"role": "user", "content": "Wet?"}], **answers}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    tree = {
        "stage": "dpo",
        "model": {"path": str(tiny_checkpoint("qwen3_moe"))},
        "data": {"train": str(tmp_path / "d.jsonl")},
    }
    asked = "<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\n"
    assert preview(recipe_from_tree(Tree(tree))) == (
        f"stage dpo: 1 row\n\nrow 1\n  chosen: {asked}⟦chosen<|im_end|>⟧\n"
        f"  rejected: {asked}⟦rejected<|im_end|>⟧"
    )
