"""Conversations of every published layout, token by token: what is learned is between ⟦ and ⟧.

The expectations are written by hand. Templates are those that TRL carries of published models.
"""

import datetime
import importlib.resources
import json
import logging
import random

import pytest

from moe_finetune.data import answers, chat
from moe_finetune.data.answers import answers_of
from moe_finetune.data.chat import Conversation
from moe_finetune.data.rows import Former
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import IGNORED, set_chat_template, tokenize_row
from moe_finetune.data.turns import each_answer
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.training.preview import marked
from tests.data import prefix_rendering
from tests.data.golden import ALIASED, TEMPLATES
from tests.data.loading import load_dataset_for
from tests.support import tiny
from tests.support.conversations import (
    ASK,
    LEGACY,
    OPENAI,
    SHAREGPT,
    TOOLS,
    TRL,
    YES,
    tokenizer_of,
)

SPLIT = {"prompt": TRL["messages"][:3], "completion": [YES], "tools": TOOLS}
LAYOUTS = {"openai": OPENAI, "trl": TRL, "sharegpt": SHAREGPT, "legacy": LEGACY}
CALLED = {  # the end of the conversation above, from the question on
    "qwen3_instruct_2507": (
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n7 mm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n"
    ),
    "qwen3_5_think": (
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦\n</think>\n\n<tool_call>\n<function=rain>\n<parameter=city>\nBonn\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n7 mm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦\n</think>\n\nYes.<|im_end|>⟧\n"
    ),
    "gptoss": (
        "<|start|>user<|message|>Wet?<|end|><|start|>assistant"
        '⟦ to=functions.rain<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>⟧'
        '<|start|>functions.rain to=assistant<|channel|>commentary<|message|>"7 mm"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>Yes.<|return|>⟧"
    ),
    "glm4moe": (
        "<|user|>\nWet?<|assistant|>⟦\n<think></think>\n<tool_call>rain\n<arg_key>city</arg_key>\n"
        "<arg_value>Bonn</arg_value>\n</tool_call>⟧<|observation|>\n<tool_response>\n7 mm\n"
        "</tool_response><|assistant|>⟦\n<think></think>\nYes.⟧"
    ),
    "nemotron_3_nano": (
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n<think>⟦</think>\n<tool_call>\n"
        "<function=rain>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>\n"
        "<|im_end|>⟧\n<|im_start|>user\n<tool_response>\n7 mm\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>⟦</think>Yes.<|im_end|>⟧\n"
    ),
    "lfm2_v2": (
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<|tool_call_start|>[rain(city='Bonn')]<|tool_call_end|><|im_end|>⟧\n"
        "<|im_start|>tool\n<|tool_response_start|>7 mm<|tool_response_end|><|im_end|>\n"
        "<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n"
    ),
}


TRL_TEMPLATES = sorted(
    file.name.removesuffix(".jinja")
    for file in (importlib.resources.files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja") and "training" not in file.name
)


def learned(row: dict, tokenizer, completion_only: bool = True, **options) -> str:
    """The row's text with what is learned between ⟦ and ⟧."""
    tokens = tokenize_row(Former(**options)("f:1", row), tokenizer, completion_only)
    for token, label in zip(tokens.input_ids, tokens.labels, strict=True):
        assert label in (token, IGNORED)
    return marked(tokens.input_ids, tokens.labels, tokenizer, ("⟦", "⟧"))


def write(tmp_path, *rows) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLED)
def test_calls_are_learned_and_results_are_not(name, layout):
    text = learned(LAYOUTS[layout], tokenizer_of(name))
    start = text.rindex(CALLED[name].partition("Wet?")[0] + "Wet?")
    assert text[start:] == CALLED[name]
    assert "rain" in text[:start] and "city" in text[:start], "the tools"
    assert ("Be brief." in text[:start]) == (layout == "sharegpt")


def test_a_prompt_of_turns_is_not_learned():
    text = learned(SPLIT, tokenizer_of("qwen3_instruct_2507"))
    assert text.count("⟦") == 1 and text.endswith("<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n")


def test_a_call_beside_prose_and_two_calls_of_one_turn():
    calls = [{"name": "rain", "arguments": {"city": c}} for c in ("Bonn", "Kiel")]
    turns = [ASK, {"role": "assistant", "content": "Let me see.", "tool_calls": calls}]
    assert learned(
        {"messages": turns, "tools": TOOLS}, tokenizer_of("qwen3_instruct_2507")
    ).endswith(
        "assistant\n⟦Let me see.\n"
        '<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "rain", "arguments": {"city": "Kiel"}}\n</tool_call><|im_end|>⟧\n'
    )


def test_calls_with_a_turn_each_are_one_answer():
    def call(city):
        return {
            "role": "tool_call",
            "content": f'{{"name": "rain", "arguments": {{"city": "{city}"}}}}',
        }

    results = [{"role": "tool_response", "content": amount} for amount in ("7 mm", "8 mm")]
    row = {"messages": [ASK, call("Bonn"), call("Oslo"), *results, YES], "tools": "null"}
    text = learned(row, tokenizer_of("qwen3_instruct_2507"))
    assert text == (
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n7 mm\n</tool_response>\n"
        "<tool_response>\n8 mm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n"
    )
    first, second = dict(row["messages"][1], train=False), row["messages"][2]
    turns = Former()("f:1", {"messages": [ASK, first, second, *results, YES]})["messages"]
    assert [turn.get("train", True) for turn in turns] == [True, False, True, True, True, True]


def test_calls_as_json_text_and_fields_of_any_type():
    calls = json.dumps(TRL["messages"][1]["tool_calls"])
    turns = [{**ASK, "id": 3, "edited": True}, {"role": "assistant", "tool_calls": calls}]
    text = learned({"messages": turns}, tokenizer_of("qwen3_instruct_2507"))
    assert text.endswith(
        '⟦<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>⟧\n'
    )


def test_an_answer_begins_with_its_whole_tag_where_the_prompt_opens_another():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    row = {"messages": [ASK, {**YES, "content": "<tool>rain</tool>"}]}
    assert learned(row, tokenizer) == "[user]Wet?[assistant]⟦<tool>rain</tool>⟧"


def test_a_row_that_was_refused_is_refused_again():
    tokenizer = tokenizer_of("deepseekv3")
    for _ in range(2):
        with pytest.raises(DataError, match="'tools': the chat template omits all or part"):
            learned(OPENAI, tokenizer)


def test_a_second_call_is_refused_also_after_a_row_with_a_single_one():
    """gpt-oss's template writes one call per turn; a second one would vanish."""
    tokenizer = tokenizer_of("gptoss")
    assert "Bonn" in learned(TRL, tokenizer)
    calls = [{"name": "rain", "arguments": {"city": city}} for city in ("Bonn", "Kiel")]
    called = {"role": "assistant", "tool_calls": calls}
    row = {"messages": [ASK, called, *TRL["messages"][2:]], "tools": TOOLS}
    with pytest.raises(DataError, match="'tool_calls': the chat template omits all or part"):
        learned(row, tokenizer)


def test_a_result_without_a_name_has_its_calls():
    """Gemma 4's template adds the tool's name to a text."""
    called, result = OPENAI["messages"][1], {"role": "tool", "tool_call_id": "c12345678"}
    row = {**OPENAI, "messages": [ASK, called, {**result, "content": "7 mm"}, YES]}
    assert Former()("rows.jsonl:1", row)["messages"][2]["name"] == "rain"
    tokenizer = tokenizer_of("gemma4")
    assert learned(row, tokenizer) == learned(OPENAI, tokenizer)
    silent = [{"type": "function", "function": {**TOOLS[0]["function"], "description": None}}]
    assert "7 mm" in learned({**TRL, "tools": silent}, tokenizer_of("gptoss"))


@pytest.mark.parametrize("second", ["rain", "snow"])
def test_a_second_call_without_arguments_is_not_taken_for_its_schema(second):
    """The tools' names are in the text anyway, and so is a call of the same tool."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "name": name}}
             for name in ("rain", "snow")]  # fmt: skip
    calls = [{"name": name, "arguments": {}} for name in ("rain", second)]
    results = [{"role": "tool", "name": call["name"], "content": "7 mm"} for call in calls]
    called = {"role": "assistant", "tool_calls": calls}
    row = {"messages": [ASK, called, *results, YES], "tools": tools}
    with pytest.raises(DataError, match="'tool_calls': the chat template omits all or part"):
        learned(row, tokenizer_of("gptoss"))
    assert learned(row, tokenizer_of("qwen3_instruct_2507")).count("</tool_call>") == 2 + 2


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


def test_arguments_stay_the_text_that_they_were_where_a_template_writes_text():
    """DeepSeek-V3's template adds the arguments to a text, which an object is not."""
    called = "⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rain\n```json\n"
    for row, arguments in ((OPENAI, '{"city":"Bonn"}'), (TRL, '{"city": "Bonn"}')):
        text = learned({**row, "tools": None}, tokenizer_of("deepseekv3"))
        assert f"Wet?<｜Assistant｜>{called}{arguments}\n```" in text
        assert "7 mm" in text and "7 mm" not in "".join(
            part.partition("⟧")[0] for part in text.split("⟦")[1:]
        )


BY_ID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c['id'] }}|{{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""How Kimi-K2's template writes a call: the id, which has the function's name, and no name."""


def test_calls_whose_name_is_in_their_id():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = BY_ID

    def row(*ids):
        arguments = {"city": "Bonn"}
        function = {"type": "function", "function": {"name": "rain", "arguments": arguments}}
        calls = [{**function, "id": id_} for id_ in ids]
        result = {"role": "tool", "tool_call_id": ids[-1], "name": "rain", "content": "7 mm"}
        called = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"messages": [ASK, called, result, YES]}

    text = learned(row("functions.rain:0", "functions.rain:1"), tokenizer)
    assert text == (
        "<|im_start|>user\nWet?<|im_end|><|im_start|>assistant\n"
        '⟦[functions.rain:0|{"city": "Bonn"}][functions.rain:1|{"city": "Bonn"}]<|im_end|>⟧'
        "<|im_start|>tool\n7 mm of functions.rain:1<|im_end|>"
        "<|im_start|>assistant\n⟦Yes.<|im_end|>⟧"
    )
    for ids in (["c12345678"], ["c12345678", "functions.rain:1"]):
        with pytest.raises(DataError, match=r"turn 1.*give each call the id functions\.NAME:INDEX"):
            learned(row(*ids), tokenizer)


THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "It rains."}
PARTS = [{"type": "text", "text": "We"}, {"type": "text", "text": "t?"}]


@pytest.mark.parametrize(
    ("name", "turns", "text"),
    [
        ("qwen3", [ASK, THOUGHT],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
         "⟦<think>\nIt rains.\n</think>\n\nYes.<|im_end|>⟧\n"),
        ("qwen3_5_think", [ASK, THOUGHT],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n<think>\n"
         "⟦It rains.\n</think>\n\nYes.<|im_end|>⟧\n"),
        ("glm4moe", [ASK, THOUGHT],
         "[gMASK]<sop><|user|>\nWet?<|assistant|>⟦\n<think>It rains.</think>\nYes.⟧"),
        ("lfm2_2_5", [ASK, {"role": "assistant", "content": "Yes.", "thinking": "It rains."}],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
         "⟦<think>It rains.</think>Yes.<|im_end|>⟧\n"),
        pytest.param("qwen3", [ASK, {**YES, "thinking": "It rains."}],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
         "⟦<think>\nIt rains.\n</think>\n\nYes.<|im_end|>⟧\n",
         marks=pytest.mark.skipif(not ALIASED, reason="refused")),
        ("qwen3", [ASK, {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nYes."}],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
         "⟦<think>\nIt rains.\n</think>\n\nYes.<|im_end|>⟧\n"),
        ("qwen3_instruct_2507", [{"role": "user", "content": PARTS},
                                 {"role": "assistant", "content": [{"type": "text", "text": "Y"}]}],
         "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n⟦Y<|im_end|>⟧\n"),
        ("gemma3", [{"role": "user", "content": PARTS}, YES],
         "<start_of_turn>user\nWet?<end_of_turn>\n<start_of_turn>model\n⟦Yes.<end_of_turn>⟧\n"),
        ("llava_next", [ASK, YES], "[INST] Wet? [/INST]⟦ Yes.</s>⟧ "),
        ("nemotron_3_nano", [{"role": "developer", "content": "Be brief."}, ASK, YES],
         "<|im_start|>system\n<|im_end|>\n<|im_start|>developer\nBe brief.<|im_end|>\n"
         "<|im_start|>user\nWet?<|im_end|>\n"
         "<|im_start|>assistant\n<think>⟦</think>Yes.<|im_end|>⟧\n"),
        ("cohere", [ASK, YES],
         "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Wet?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
         "<|CHATBOT_TOKEN|>⟦Yes.<|END_OF_TURN_TOKEN|>⟧"),
        ("phi3", [ASK, YES], "<|user|>\nWet?<|end|>\n<|assistant|>\n⟦Yes.<|end|>\n<|endoftext|>⟧"),
    ],
)  # fmt: skip
def test_a_turn_as_its_template_writes_it(name, turns, text):
    assert learned({"messages": turns}, tokenizer_of(name)) == text


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
    unread = "name (in 1 turns), note (in 2 turns), reasoning_details (in 1 turns)"
    assert f"train data: fields of turns not used: {unread}" in caplog.messages
    caplog.clear()
    own = tokenizer.chat_template.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.note }}")
    assert own != tokenizer.chat_template
    tokenizer.chat_template = own
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert "note" not in caplog.text and "reasoning_details (in 1 turns)" in caplog.text
    caplog.clear()
    tokenizer.chat_template = (
        own + "{% for m in messages %}{% if m | tojson %}{% endif %}{% endfor %}"
    )
    load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert "fields of turns perhaps used (the template reads turns whole): name" in caplog.text


NAMED_TURNS = [name for name in TRL_TEMPLATES if name.startswith(("gemma4", "muse", "diffusion"))]


@pytest.mark.parametrize("name", TRL_TEMPLATES)
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


def test_tools_of_a_turn_are_those_of_the_row_and_calls_without_any_are_counted(tmp_path, caplog):
    system = {"role": "system", "content": "Be brief."}
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    inside = {"messages": [{**system, "tools": TOOLS}, *TRL["messages"]]}
    beside = {"messages": [system, *TRL["messages"]], "tools": TOOLS}
    assert learned(inside, tokenizer) == learned(beside, tokenizer)
    rows = [inside, beside, {"messages": beside["messages"]}]
    load_dataset_for(DataSection(train=write(tmp_path, *rows)), tokenizer, 0)
    assert "train data: 1 rows call tools that no 'tools' define" in caplog.messages
    assert "fields of turns" not in caplog.text


def test_tools_among_the_variables_are_those_of_the_row():
    row = {"messages": [ASK, YES], "chat_template_kwargs": {"tools": TOOLS}}
    tokenizer = tokenizer_of("qwen3")
    text = learned(row, tokenizer)
    assert text == learned({"messages": [ASK, YES], "tools": TOOLS}, tokenizer)
    assert "Rain?" in text


def test_marks_of_parts_that_exclude_nothing_are_not_read():
    parts = [{"type": "text", "text": "Yes.", "loss_mask": 1}]
    asked = {**ASK, "content": [{"type": "text", "text": "Wet?", "loss_mask": 0}]}
    row = {"messages": [asked, {**YES, "content": parts}]}
    assert learned(row, tiny.tokenizer()) == learned({"messages": [ASK, YES]}, tiny.tokenizer())


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_a_call_of_a_tool_without_parameters(arguments):
    calls = [{"type": "function", "function": {"name": "rain", "arguments": arguments}}]
    row = {"messages": [ASK, {"role": "assistant", "tool_calls": calls}], "tools": TOOLS}
    call = '⟦<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call><|im_end|>⟧\n'
    assert learned(row, tokenizer_of("qwen3_instruct_2507")).endswith(call)


GREETING = {"role": "assistant", "content": "Hello."}
ANSWERED = "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2_5", "<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n" + ANSWERED
         + "⟦Yes.<|im_end|>⟧\n"),
        ("qwen3", "<|im_start|>assistant\nHello.<|im_end|>\n" + ANSWERED
         + "⟦<think>\n\n</think>\n\nYes.<|im_end|>⟧\n"),
        ("llama3_1", "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nWet?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes.<|eot_id|>⟧"),
    ],
)  # fmt: skip
def test_a_conversation_that_the_assistant_opens(name, text, tmp_path, caplog):
    """Its later answers are learned, the first where the template's tags show it."""
    tokenizer, row = tokenizer_of(name), {"messages": [GREETING, ASK, YES]}
    assert learned(row, tokenizer).endswith(text)
    load_dataset_for(DataSection(train=write(tmp_path, row)), tokenizer, 0)
    assert ("1 rows: the chat template refuses the turns before" in caplog.text) == (
        name != "qwen2_5"
    )
    caplog.clear()
    each, _ = load_dataset_for(DataSection(train=write(tmp_path, row), turns="each"), tokenizer, 0)
    shown = [marked(r["input_ids"], r["labels"], tokenizer, ("⟦", "⟧")) for r in each]
    assert any(line.endswith(text[-20:]) for line in shown)
    hidden = {"messages": [{**GREETING, "train": False}, ASK, YES]}
    assert text.rpartition("⟦")[2] in learned(hidden, tokenizer).rpartition("⟦")[2]


def test_the_last_of_two_assistant_turns_is_learned():
    text = learned({"messages": [ASK, GREETING, YES]}, tokenizer_of("qwen3"))
    assert text.endswith(
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nYes.<|im_end|>⟧\n"
    )


def test_no_empty_think_block_is_learned_before_thoughts():
    """Qwen3.8's template adds one in front of thoughts that are in the content."""
    content = "<think>\nIt rains.\n</think>\n\nYes."
    rows = [{"messages": [ASK, {**YES, "content": content}]}, {"messages": [ASK, THOUGHT]}]
    tokenizer = tokenizer_of("qwen3_8")
    texts = [learned(row, tokenizer) for row in rows]
    assert texts[0] == texts[1] and texts[0].count("</think>") == 1
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace(
        "{% generation %}", "{% generation %}<think>\n\n</think>\n\n"
    )
    with pytest.raises(DataError, match="turn 1: 'reasoning_content': the chat template omits"):
        learned(rows[0], tokenizer)


def test_answers_without_thoughts_where_the_prompt_opens_them_are_counted(tmp_path, caplog):
    file = write(tmp_path, {"messages": [ASK, YES]}, {"messages": [ASK, THOUGHT]})
    said = "1 rows: an answer has no thoughts where the chat template's prompt opens a think block"
    for name, counted in (("qwen3_5_think", True), ("nemotron_3_nano", True), ("qwen3", False)):
        caplog.clear()
        load_dataset_for(DataSection(train=file), tokenizer_of(name), 0)
        assert (said in caplog.text) is counted, name


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("few", [12, 0], ids=["each", "by kind"])
def test_answers_are_those_of_prefix_rendering(template, few, monkeypatch):
    """Every template, conversations of 1 to 12 turns: with calls, thoughts, several questions."""
    monkeypatch.setattr(answers, "FEW", few)
    tokenizer, generator = tokenizer_of(template), random.Random(template)
    compared = 0
    for _ in range(40):
        try:
            conversation = Conversation(Former()("f:1", some_conversation(generator)), tokenizer)
            slow = prefix_rendering.answers(conversation)
        except DataError:  # refused, or opened by the assistant
            continue
        fast = answers_of(conversation)
        assert fast.keys() == slow.keys()
        for i, answer in slow.items():
            after_another = i and conversation.turns[i - 1]["role"] == "assistant"
            if answer.rewritten and after_another:
                continue
            assert fast[i].rewritten == answer.rewritten, (i, conversation.turns)
            assert answer.rewritten or fast[i].pieces == answer.pieces, (i, conversation.turns)
            compared += 1
    assert compared > 10 or template == "llama3"  # which has no end of a turn in one rendering


def some_conversation(generator: random.Random) -> dict:
    calls, thinks = generator.random() < 0.5, generator.random() < 0.4
    turns = [{"role": "system", "content": "Be brief."}] if generator.random() < 0.3 else []
    length = generator.randint(2, 12)
    while len(turns) < length:
        number = len(turns)
        if not turns or turns[-1]["role"] in ("system", "assistant"):
            turns.append({"role": "user", "content": f"Q{number}?"})
            continue
        turn = {"role": "assistant", "content": f"A{number}."}
        if thinks and generator.random() < 0.7:
            turn["reasoning_content"] = f"Hm {number}."
        turns.append(turn)
        if calls and generator.random() < 0.6:
            function = {"name": "rain", "arguments": {"city": f"B{number}"}}
            call = {"type": "function", "id": f"c{number:08d}", "function": function}
            turn |= {"tool_calls": [call], "content": generator.choice([None, "Let me see."])}
            turns.append({"role": "tool", "name": "rain", "tool_call_id": call["id"],
                          "content": f"{number} mm"})  # fmt: skip
    return {"messages": turns, **({"tools": TOOLS} if calls else {})}


@pytest.mark.parametrize("name", ["qwen3", "gemma4_v5", "llama3_1"])
def test_a_long_conversation_is_rendered_a_few_times(name, monkeypatch):
    """Not once for each of its answers."""
    turns = [ASK]
    for number in range(150):
        function = {"name": "rain", "arguments": {"city": f"Bonn {number}"}}
        call = {"type": "function", "id": f"c{number:08d}", "function": function}
        result = {"role": "tool", "name": "rain", "tool_call_id": call["id"], "content": "7 mm"}
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    rendered = []
    jinja = chat.render_jinja_template

    def counted(conversations, **options):
        rendered.append(len(conversations[0]))
        return jinja(conversations, **options)

    monkeypatch.setattr(chat, "render_jinja_template", counted)
    learned({"messages": [*turns, YES], "tools": TOOLS}, tokenizer_of(name))
    assert 0 < len(rendered) < 25


def test_a_template_that_rewrites_answers_learns_each_of_them_on_request(tmp_path, caplog):
    turns = [ASK, THOUGHT, {"role": "user", "content": "Why?"}, {**YES, "content": "Clouds."}]
    tokenizer = tokenizer_of("qwen3_5_think")
    examples = [learned(example, tokenizer) for example in each_answer({"messages": turns})]
    assert examples == [
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦It rains.\n</think>\n\nYes.<|im_end|>⟧\n",
        "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦\n</think>\n\nClouds.<|im_end|>⟧\n",
    ]
    file = write(tmp_path, {"messages": turns})
    caplog.set_level(logging.INFO, "moe_finetune")
    whole, _ = load_dataset_for(DataSection(train=file), tokenizer, 0)
    assert len(whole) == 1 and "those answers are not learned (data.turns: each" in caplog.text
    each, _ = load_dataset_for(DataSection(train=file, turns="each"), tokenizer, 3)
    shown = {marked(r["input_ids"], r["labels"], tokenizer, ("⟦", "⟧")) for r in each}
    assert shown == set(examples)


def test_answers_without_an_end_of_turn_token_are_reported(tmp_path, caplog):
    # GLM-4.5 ends an answer with the tag of the turn that follows, which its template leaves out.
    file = write(tmp_path, {"messages": [ASK, YES]}, {"messages": [ASK, {**YES, "train": False}]})
    ends = {}
    for name, template in (
        ("glm4moe", None),
        ("glm4moe", "training"),
        ("qwen3", None),
        ("deepseekv3", None),
        ("gptoss", None),
        ("gemma4", None),
    ):
        caplog.clear()
        tokenizer = tokenizer_of(name)
        tokenizer.add_tokens(["<turn|>"])
        section = DataSection(train=file, chat_template=template)
        rows, _ = load_dataset_for(section, tokenizer, 0)
        text = marked(rows[0]["input_ids"], rows[0]["labels"], tokenizer, ("⟦", "⟧"))
        warned = "1 rows: the chat template ends an answer without a special token" in caplog.text
        ends[name, template] = (text.strip().removesuffix("⟧")[-5:], warned)
    assert ends == {
        ("glm4moe", None): ("\nYes.", True),
        ("glm4moe", "training"): ("ser|>", False),
        ("qwen3", None): ("end|>", False),
        ("deepseekv3", None): ("nce｜>", False),
        ("gptoss", None): ("urn|>", False),
        ("gemma4", None): ("urn|>", False),
    }


def test_trls_variant_of_a_template_is_a_name():
    tokenizer = tokenizer_of("qwen3")
    set_chat_template(tokenizer, "training")
    turns = [ASK, YES, ASK, YES]
    answered = "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nYes.<|im_end|>⟧\n"
    asked = "<|im_start|>user\nWet?<|im_end|>\n"
    assert learned({"messages": turns}, tokenizer) == (asked + answered) * 2
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(DataError, match="TRL has no training version of this tokenizer's"):
        set_chat_template(tokenizer, "training")


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
        ("qwen3", {"messages": [ASK, YES], "tools": ["f"]}, r"'tools': must be a list of JSON sch"),
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


def test_nulls_that_a_table_fills_in_are_no_arguments(tmp_path):
    from datasets import Dataset

    def call(**arguments):
        calls = [{"type": "function", "function": {"name": "rain", "arguments": arguments}}]
        return {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]}

    file = tmp_path / "rows.parquet"
    Dataset.from_list([call(city="Bonn"), call(day=3)]).to_parquet(str(file))
    train, _ = load_dataset_for(
        DataSection(train=str(file)), tokenizer_of("qwen3_instruct_2507"), 0
    )
    texts = sorted(tiny.tokenizer().decode(ids) for ids in train["input_ids"])
    assert ['{"city": "Bonn"}' in texts[0], '{"day": 3}' in texts[1]] == [True, True]


def test_the_date_is_that_of_the_first_preparation(tmp_path, monkeypatch):
    tokenizer = tokenizer_of("gptoss")
    file = write(tmp_path, {"messages": [ASK, YES]})

    def shown(day):
        monkeypatch.setattr("moe_finetune.data.chat.midnight", lambda: day)
        train, _ = load_dataset_for(DataSection(train=file, max_length=4096), tokenizer, 0)
        return tokenizer.decode(train[0]["input_ids"]).partition("Current date: ")[2][:10]

    day = datetime.datetime(2026, 3, 4)
    assert shown(day) == "2026-03-04"
    assert shown(day + datetime.timedelta(1)) == "2026-03-04", "what was prepared keeps its date"
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "other machine"))
    assert shown(day + datetime.timedelta(1)) == "2026-03-05"


def test_the_prompt_of_a_template_that_writes_the_time_begins_the_whole():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }}" + tiny.CHAT_TEMPLATE
    ids = tokenize_row({"messages": [ASK, YES]}, tokenizer, True).input_ids
    assert tokenizer.decode(ids).startswith("00:00:00.000000")


def test_processes_render_for_themselves(tmp_path):
    rows = [{"messages": [{**ASK, "content": f"Wet {i}?"}, YES]} for i in range(7)]
    section = DataSection(train=write(tmp_path, *rows), num_proc=2)
    train, _ = load_dataset_for(section, tiny.tokenizer(), 0)
    texts = sorted(tiny.tokenizer().decode(ids) for ids in train["input_ids"])
    assert [text[len("<|im_start|>user\n") :][:5] for text in texts] == [
        f"Wet {i}" for i in range(7)
    ]
    section = DataSection(train=write(tmp_path, *rows, {"messages": [ASK, THOUGHT]}), num_proc=2)
    with pytest.raises(DataError, match=r"rows\.jsonl:8: turn 1: 'reasoning_content'"):
        load_dataset_for(section, tiny.tokenizer(), 0)


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
