"""Conversations token by token: what is learned is between ⟦ and ⟧.

The expectations are written by hand. Templates are those that TRL carries of published models.
"""

import datetime
import logging
import random

import pytest

from moe_finetune.data import answers, chat
from moe_finetune.data.answers import answers_of
from moe_finetune.data.chat import Conversation
from moe_finetune.data.row_forms import Former
from moe_finetune.data.tokenize import set_chat_template, tokenize_row
from moe_finetune.data.turns import each_answer
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.training.before.preview import marked
from tests.data import prefix_rendering
from tests.data.golden import ALIASED, PARTS, TEMPLATES, THOUGHT
from tests.data.loading import load_dataset_for
from tests.support import tiny
from tests.support.conversations import (
    ASK,
    TOOLS,
    YES,
    learned,
    tokenizer_of,
    write,
)


def test_an_answer_begins_with_its_whole_tag_where_the_prompt_opens_another():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    row = {"messages": [ASK, {**YES, "content": "<tool>rain</tool>"}]}
    assert learned(row, tokenizer) == "[user]Wet?[assistant]⟦<tool>rain</tool>⟧"


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
    assert ("1 row: the chat template refuses the turns before" in caplog.text) == (
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
    rows = [[ASK, YES], [ASK, THOUGHT], [ASK, {**YES, "content": "No."}]]
    file = write(tmp_path, *({"messages": row} for row in rows))
    said = "an answer has no thoughts where the chat template's prompt opens a think block"
    for name, counted in (("qwen3_5_think", True), ("nemotron_3_nano", True), ("qwen3", False)):
        caplog.clear()
        load_dataset_for(DataSection(train=file), tokenizer_of(name), 0)
        assert (f"2 rows: {said}" in caplog.text) is (said in caplog.text) is counted, name


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


def test_a_loop_of_calls_before_the_last_question_is_not_like_the_one_after_it(monkeypatch):
    """Neighbors are the same, but the template drops thoughts that are older than the question."""
    monkeypatch.setattr(answers, "FEW", 0)
    turns = []
    for question in ("Where is it?", "And now?"):
        turns.append({"role": "user", "content": question})
        for step in range(4):
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": step}}}
            thought = f"{question} Step {step}."
            turns += [
                {"role": "assistant", "reasoning_content": thought, "tool_calls": [call]},
                {"role": "tool", "content": f"nothing at {step}"},
            ]
        turns.append({"role": "assistant", "content": "Here."})
    conversation = Conversation(Former()("f:1", {"messages": turns}), tokenizer_of("qwen3"))
    fast, slow = answers_of(conversation), prefix_rendering.answers(conversation)
    assert {i for i, answer in fast.items() if answer.rewritten} == {1, 3, 5, 7, 9}
    assert all(slow[i].rewritten or slow[i].pieces == fast[i].pieces for i in slow)


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
        warned = "1 row: the chat template ends an answer without a special token" in caplog.text
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
