"""Calls of tools in every published layout, token by token: what is learned is between ⟦ and ⟧.

The expectations are written by hand. Templates are those that TRL carries of published models.
"""

import json

import pytest
from transformers import AddedToken

from moe_finetune.data.row_forms import Former
from moe_finetune.data.tokenize import tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
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
    learned,
    tokenizer_of,
    write,
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


def test_tools_of_a_turn_are_those_of_the_row_and_calls_without_any_are_counted(tmp_path, caplog):
    system = {"role": "system", "content": "Be brief."}
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    inside = {"messages": [{**system, "tools": TOOLS}, *TRL["messages"]]}
    beside = {"messages": [system, *TRL["messages"]], "tools": TOOLS}
    assert learned(inside, tokenizer) == learned(beside, tokenizer)
    rows = [inside, beside, {"messages": beside["messages"]}]
    load_dataset_for(DataSection(train=write(tmp_path, *rows)), tokenizer, 0)
    assert "train data: 1 row calls tools that no 'tools' define" in caplog.messages
    assert "fields of turns" not in caplog.text


def test_tools_of_which_each_is_json_text():
    """A table has them so where their schemas have different fields."""
    tokenizer = tokenizer_of("qwen3_instruct_2507")
    texts = {**TRL, "tools": [json.dumps(tool) for tool in TOOLS]}
    assert learned(texts, tokenizer) == learned({**TRL, "tools": TOOLS}, tokenizer)
    with pytest.raises(DataError, match=r"f:1: 'tools'\[0\]: .*'\{rain'"):
        learned({**TRL, "tools": ["{rain"]}, tokenizer)


def test_tools_among_the_variables_are_those_of_the_row():
    row = {"messages": [ASK, YES], "chat_template_kwargs": {"tools": TOOLS}}
    tokenizer = tokenizer_of("qwen3")
    text = learned(row, tokenizer)
    assert text == learned({"messages": [ASK, YES], "tools": TOOLS}, tokenizer)
    assert "Rain?" in text


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_a_call_of_a_tool_without_parameters(arguments):
    calls = [{"type": "function", "function": {"name": "rain", "arguments": arguments}}]
    row = {"messages": [ASK, {"role": "assistant", "tool_calls": calls}], "tools": TOOLS}
    call = '⟦<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call><|im_end|>⟧\n'
    assert learned(row, tokenizer_of("qwen3_instruct_2507")).endswith(call)


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


@pytest.mark.parametrize(("name", "endless"), [("glm4moe", True), ("qwen3", False)])
def test_a_closing_tag_is_no_end_of_a_turn(name, endless):
    """In the published tokenizers ``</tool_call>`` is an added token that is not special."""
    tokenizer = tokenizer_of(name)
    tags = ["<tool_call>", "</tool_call>", "</think>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    row = {"tools": TOOLS, "messages": OPENAI["messages"][:2]}
    assert tokenize_row(Former()("f:1", row), tokenizer, True).endless is endless
