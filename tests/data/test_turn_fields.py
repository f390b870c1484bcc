"""Fields of turns: which exclude an answer, which are not used, and what a template would omit."""

import logging

import pytest

from moe_finetune.data.chat import Conversation
from moe_finetune.data.row_forms import Former
from moe_finetune.data.template_fields import field_reader
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from tests.data.golden import ALIASED, TEMPLATES, THOUGHT
from tests.data.loading import load_dataset_for
from tests.support import tiny
from tests.support.conversations import (
    ASK,
    OPENAI,
    TOOLS,
    TRL,
    YES,
    learned,
    tokenizer_of,
    write,
)


def test_a_turn_that_the_template_drops_is_noticed_also_if_its_text_occurs_elsewhere():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}|{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ask = {"role": "user", "content": "7 mm of what?"}
    turns = [ask, *TRL["messages"][1:3], {**YES, "content": "It is 7 mm."}]
    with pytest.raises(DataError, match="turn 2: 'content': the chat template omits all or part"):
        learned({"messages": turns}, tokenizer)


def test_variables_of_the_template_come_from_the_row():
    row = {"messages": [ASK, YES], "chat_template_kwargs": {"enable_thinking": False}}
    assert learned(row, tokenizer_of("qwen3_5_think")).endswith(
        "assistant\n<think>\n\n</think>\n\n⟦Yes.<|im_end|>⟧\n"
    )


def test_a_turn_may_say_that_it_is_not_learned():
    turns = [
        ASK,
        {**YES, "train": False},
        ASK,
        {"role": "assistant", "content": "No.", "weight": 1},
    ]
    text = (
        "<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\nYes.<|im_end|>"
        "<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\n⟦No.<|im_end|>⟧"
    )
    assert learned({"messages": turns}, tiny.tokenizer()) == text
    everything = learned({"messages": turns}, tiny.tokenizer(), completion_only=False)
    assert everything == (
        "⟦<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\n⟧Yes.<|im_end|>"
        "⟦<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\nNo.<|im_end|>⟧"
    )


@pytest.mark.parametrize(
    "mark",
    [
        {"trainable": False}, {"loss_mask": 0}, {"step_loss_mask": 0.0}, {"train_on_turn": False},
        {"masked": True}, {"weight": 0}, {"training": False}, {"loss": False}, {"loss_scale": 0},
        {"loss_weight": 0.0},
    ],
    ids=lambda mark: next(iter(mark)),
)  # fmt: skip
def test_what_other_trainers_exclude_is_not_learned_and_counted(tmp_path, caplog, mark):
    ((name, value),) = mark.items()
    learned_too = {name: type(value)(1 - value)}
    shown = [{**ASK, **mark} if name != "masked" else ASK, {**YES, **mark}]
    rows = [{"messages": [*shown, ASK, {"role": "assistant", "content": "No.", **learned_too}]}] * 2
    text = learned(rows[0], tiny.tokenizer())
    assert text.endswith("Yes.<|im_end|><|im_start|>user\nWet?<|im_end|>"
                         "<|im_start|>assistant\n⟦No.<|im_end|>⟧")  # fmt: skip
    assert text.count("⟦") == 1
    load_dataset_for(DataSection(train=write(tmp_path, *rows)), tiny.tokenizer(), 0)
    line = f"train data: 2 answers are not learned, because of their field '{name}'"
    assert line in caplog.messages and "fields of turns" not in caplog.text


def test_fields_of_turns_that_nothing_reads_are_counted(tmp_path, caplog):
    thought = {**YES, "reasoning_details": [{"text": "It rains."}], "note": 3}
    rows = [{"messages": [{**ASK, "name": "Ada"}, thought, ASK, {**YES, "note": 4}]}]
    file, tokenizer = write(tmp_path, *rows), tiny.tokenizer()
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    unread = "name (in 1 turn), note (in 2 turns), reasoning_details (in 1 turn)"
    assert f"train data: fields of turns not used: {unread}" in caplog.messages
    caplog.clear()
    own = tokenizer.chat_template.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.note }}")
    assert own != tokenizer.chat_template
    tokenizer.chat_template = own
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert "note" not in caplog.text and "reasoning_details (in 1 turn)" in caplog.text
    caplog.clear()
    tokenizer.chat_template = (
        own + "{% for m in messages %}{% if m | tojson %}{% endif %}{% endfor %}"
    )
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert "fields of turns perhaps used (the template reads turns whole): name" in caplog.text


NAMED_TURNS = [name for name in TEMPLATES if name.startswith(("gemma4", "muse", "diffusion"))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_counts_as_not_used_changes_no_text(name):
    """A call's name, and a tool's, are no turn's: a user's is named."""
    tokenizer = tokenizer_of(name)
    reads = field_reader(tokenizer)("name")
    assert reads is (name in NAMED_TURNS and name != "gemma4_v2")
    turns = OPENAI["messages"] if "tool_calls" in tokenizer.chat_template else [ASK, YES]
    row = {**Former()("f:1", {"messages": turns}), "variables": {"bos_token": "<s>"}}
    named = [{**turn, "name": turn.get("name", "Ada")} for turn in row["messages"]]
    texts = [Conversation({**row, "messages": t}, tokenizer).text for t in (row["messages"], named)]
    assert reads or texts[0] == texts[1]


def test_marks_of_parts_that_exclude_nothing_are_not_read():
    parts = [{"type": "text", "text": "Yes.", "loss_mask": 1}]
    asked = {**ASK, "content": [{"type": "text", "text": "Wet?", "loss_mask": 0}]}
    row = {"messages": [asked, {**YES, "content": parts}]}
    assert learned(row, tiny.tokenizer()) == learned({"messages": [ASK, YES]}, tiny.tokenizer())


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("qwen3_instruct_2507", {"messages": [ASK, THOUGHT]},
         r"turn 1: 'reasoning_content': the chat template omits all or part of it; choose another"),
        pytest.param(
         "qwen3", {"messages": [ASK, {**YES, "thinking": "It rains."}]},
         r"turn 1: 'thinking'.*rename the field to reasoning_content or reasoning,",
         marks=pytest.mark.skipif(ALIASED, reason="transformers renames the field itself")),
        ("deepseek_r1_distill",
         {"messages": [ASK, {**YES, "content": "<think>It rains.</think>Yes."}]},
         r"turn 1: 'content': the chat template omits all or part of it"),
        ("qwen3", {"messages": [{"role": "developer", "content": "Brief."}, ASK, YES]},
         r"turn 0: 'content': the chat template omits all or part of it"),
        ("cohere", OPENAI, r"the chat template rejects these messages: .*; choose another"),
        ("deepseekv3", OPENAI, r"'tools': the chat template omits all or part"),
        ("qwen3", {"messages": [ASK, YES], "images": ["a.png"]},
         r"'images': only text can be trained"),
        ("qwen3", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, YES]},
         r"messages\[0\]: content\[0\]: a part of type 'image_url'"),
        ("qwen3", {"messages": [ASK, {**YES, "weight": 0.5}]}, 
         r"'weight': is not read; .*train: false"),
        ("qwen3", {"messages": [ASK, YES], "functions": [TOOLS[0]["function"]]},
         r"'functions': only text can be trained, with the column 'tools'"),
        ("qwen3", {"messages": [ASK, {**YES, "loss": 0.3}]}, r"'loss': is not read; .*train: fal"),
        ("qwen3", {"messages": [ASK, {**YES, "loss_scale": 0.5}]}, r"'loss_scale': is not read"),
        ("qwen3", {"messages": [ASK, {**YES, "loss_mask": "no"}]}, r"'loss_mask': .*train: false"),
        ("qwen3", {"messages": [ASK, {**YES, "mask": True}]}, r"'mask': is not read; .*train: fal"),
        ("qwen3", {"messages": [{**ASK, "loss_mask": 1}, YES]},
         r"messages\[0\]: 'loss_mask' is set on a turn of 'user'"),
        ("qwen3", {"messages": [{**ASK, "masked": False}, YES]}, r"'masked' is set on a turn of"),
        ("qwen3", {"messages": [{**ASK, "train": True}, YES]},
         r"'train' is set on a turn of 'user'"),
        ("qwen3", {"messages": [ASK, YES], "tools": "[{"}, r"'tools': not JSON"),
        ("qwen3", {"messages": [ASK, YES], "tools": [3]}, r"'tools': must be a list of JSON sch"),
        ("qwen3", {"messages": [ASK, YES], "tools": [*TOOLS, "f"]}, r"'tools'\[1\]: not JSON"),
        ("qwen3", {"messages": [ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         r"messages\[1\]: tool_calls\[0\]: the call has no function name"),
        ("qwen3", {"messages": [ASK, {"role": "assistant",
                                      "tool_calls": [{"name": "f", "arguments": "{"}]}]},
         r"tool_calls\[0\]: arguments: not JSON"),
        ("qwen3", {"messages": [ASK, {"role": "assistant",
                                      "tool_calls": [{"name": "f", "arguments": [1]}]}]},
         r"arguments: must be an object, not \[1\]"),
        ("qwen3", {"messages": [{**ASK, "tool_calls": [{"name": "f"}]}, YES]}, r"only the assis"),
        ("qwen3", {"conversations": [{"from": "human", "value": "a"},
                                     {"from": "function_call", "value": "rain"}]},
         r"messages\[1\]: function_call: not JSON"),
        ("qwen3", {"messages": [{"role": "system", "content": "A"}, ASK, YES], "system": "B"},
         r"two different system prompts"),
        ("qwen3", {"messages": [ASK, YES], "chat_template_kwargs": 3}, r"must be an object, not 3"),
        ("qwen3", {"messages": [ASK, {"role": "assistant", "content": None}]}, r"content is empty"),
        ("qwen3", {"messages": [ASK, {**YES, "train_detail": [{"begin_offset": 0}]}]},
         r"messages\[1\]: 'train_detail': is not read"),
        ("qwen3", {"messages": [*TRL["messages"][:2], {"role": "tool", "content": {"mm": 7}}, YES]},
         r"messages\[2\]: content: must be text, not \{'mm': 7\}"),
        ("qwen3", {"messages": [ASK, {**YES, "content": [
            {"type": "text", "text": "No.", "loss_mask": 0}, {"type": "text", "text": "Yes."}]}]},
         r"messages\[1\]: content\[0\]: 'loss_mask': a turn is learned as.*train: false"),
        ("qwen3", {"messages": [ASK, {**TRL["messages"][1], "tool_calls": [
            {**TRL["messages"][1]["tool_calls"][0], "weight": 0}]}, *TRL["messages"][2:]]},
         r"messages\[1\]: tool_calls\[0\]: 'weight': a turn is learned as.*train: false"),
        ("qwen3", {"messages": [ASK, YES], "chat_template_kwargs": {"add_generation_prompt": True}},
         r"'chat_template_kwargs': 'add_generation_prompt' is no variable"),
        ("qwen3", {"messages": [ASK, YES], "tools": TOOLS, "chat_template_kwargs": {
            "tools": [{"name": "snow", "description": "", "parameters": {}}]}},
         r"'tools' and those of 'chat_template_kwargs' differ"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_with_file_and_line(tmp_path, name, row, said):
    field = "messages" if "messages" in row else "conversations"
    file = write(tmp_path, {field: [ASK, YES]}, row)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{said}"):
        load_dataset_for(DataSection(train=file), tokenizer_of(name), 0)


def test_earlier_turns_of_alpaca_rows_are_not_left_out():
    row = {"instruction": "Wet?", "output": "Yes.", "history": [["Hi", "Hello"]]}
    with pytest.raises(DataError, match="f:1: 'history': the earlier turns"):
        Former()("f:1", row)
    assert Former()("f:1", {**row, "history": []})["completion"] == " Yes."


def test_columns_that_nothing_reads_are_named_once(tmp_path, caplog):
    rows = [
        {**OPENAI, "source": "web", "score": score, "empty": None, "parallel_tool_calls": True}
        for score in (1, 2)
    ]
    file, tokenizer = write(tmp_path, *rows), tokenizer_of("qwen3_instruct_2507")
    caplog.set_level(logging.INFO, "moe_finetune")
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    said = "not used: parallel_tool_calls, score, source"
    assert caplog.text.count(said) == 1
    caplog.clear()
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert caplog.text.count(said) == 1, "also of data that were prepared before"
