"""Turns of preferences and prompts: the tokens that TRL's trainers make of them, by hand.

What an answer is judged by is between ⟦ and ⟧.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken

from moe_finetune.data.load_rows import load_stage_rows
from moe_finetune.data.preference_and_prompt_rows import ids_of
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.run import trainer as run_trainer
from tests.data.stage_layouts import CALLED, NO
from tests.support import tiny
from tests.support.conversations import (
    ASK,
    FUNCTION,
    OPENAI,
    SHAREGPT,
    TOOLS,
    YES,
    tokenizer_of,
)

PREFERENCES = {
    "trl": {"prompt": CALLED, "chosen": [YES], "rejected": [NO], "tools": json.dumps(TOOLS)},
    "whole": {"chosen": [*CALLED, YES], "rejected": [*CALLED, NO], "tools": TOOLS},
    "openai": {"prompt": OPENAI["messages"][:3], "chosen": [YES], "rejected": [NO], "tools": TOOLS},
    "sharegpt": {
        "conversations": SHAREGPT["conversations"][:3],
        "tools": json.dumps([FUNCTION]),
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
}
ASKED = (
    "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n7 mm\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture
def tokenizer():
    return tokenizer_of("qwen3_instruct_2507")


def load(stage: str, row: dict, tokenizer, tmp_path, **options):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    options = {"max_length": 4096, **options}
    return load_stage_rows(
        STAGES[stage], DataSection(train=str(file), **options), tokenizer, seed=0
    )


def trainer_of(stage: str, examples, tokenizer, tmp_path):
    """TRL's trainer, which has made tokens of the rows."""
    found = STAGES[stage]
    arguments = found.config_class()(
        output_dir=str(tmp_path / "out"), max_length=4096, use_cpu=True, bf16=False,
        report_to="none", per_device_train_batch_size=2,
    )  # fmt: skip
    return found.trainer_class()(
        model=tiny.model("olmoe"),
        ref_model=tiny.model("olmoe"),
        args=arguments,
        train_dataset=examples.train,
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("layout", PREFERENCES)
def test_dpo(tokenizer, tmp_path, layout):
    columns = {"prompt": "conversations"} if layout == "sharegpt" else None
    examples = load("dpo", PREFERENCES[layout], tokenizer, tmp_path, columns=columns)
    row = trainer_of("dpo", examples, tokenizer, tmp_path).train_dataset[0]
    prompt = tokenizer.decode(row["prompt_ids"])
    assert prompt.endswith(ASKED) and '"description": "Rain?"' in prompt.removesuffix(ASKED)
    assert tokenizer.decode(row["chosen_ids"]) == "Yes.<|im_end|>\n"
    assert tokenizer.decode(row["rejected_ids"]) == "No.<|im_end|>\n"


TURNS = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
LONG = {**TURNS, "rejected": [{**NO, "content": "No. " * 40}]}
TEXTS = {"prompt": "Wet?", "chosen": " Yes.", "rejected": " No, it is not<|im_end|>"}
STOCK = {
    "turns": [TURNS, TURNS],
    "texts": [TEXTS, {**TEXTS, "chosen": " Yes. " * 40}],
    "tools": [PREFERENCES["trl"], {**PREFERENCES["trl"], "rejected": LONG["rejected"]}],
    "whole": [{**PREFERENCES["whole"], "tools": json.dumps(TOOLS)}] * 2,
    "variables": [{**TURNS, "chat_template_kwargs": {"enable_thinking": False}}] * 2,
    "long": [LONG, TURNS, {**TURNS, "prompt": [{**ASK, "content": "Wet? " * 300}]}],
}


def batches(stage, rows, tokenizer, folder, length, kind=None):
    """The batches of an epoch, as TRL's collator makes them."""
    arguments = STAGES[stage].config_class()(
        output_dir=str(folder / "out"), max_length=length, use_cpu=True, bf16=False,
        report_to="none", per_device_train_batch_size=2, seed=3,
    )  # fmt: skip
    trainer = (kind or STAGES[stage].trainer_class())(
        model=tiny.model("olmoe"), ref_model=tiny.model("olmoe"), args=arguments,
        train_dataset=rows, processing_class=tokenizer,
    )  # fmt: skip
    return list(trainer.get_train_dataloader())


@pytest.mark.parametrize("name", STOCK)
def test_batches_are_those_of_a_stock_trainer(name, tokenizer, tmp_path, caplog):
    """Also where TRL truncates answers, and drops rows whose prompt is too long."""
    length = {"tools": 720, "whole": 4096}.get(name, 40)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in STOCK[name]))
    section = DataSection(train=str(file), validation=str(file), max_length=length)
    rows = load_stage_rows(STAGES["dpo"], section, tokenizer, seed=0).validation  # not shuffled
    said = caplog.text
    ours = run_trainer.trainer_of(STAGES["dpo"])
    ours = batches("dpo", rows, tokenizer, tmp_path, length, ours)
    rows = Dataset.from_list(STOCK[name], on_mixed_types="use_json")
    stock = batches("dpo", rows, tokenizer, tmp_path, length)
    assert len(ours) == len(stock) > 0
    for one, other in zip(ours, stock, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert ("truncated by" in said) is (name in ("texts", "tools", "long"))
    assert ("and was dropped" in said) is (name == "long")


@pytest.mark.parametrize("prompt", ["Wet? ", [ASK], [*CALLED, YES, ASK]])
def test_prompts_are_counted_as_grpo_tokenizes_them(prompt, tokenizer, tmp_path):
    row = load("grpo", {"prompt": prompt}, tokenizer, tmp_path).train[0]
    trainer = SimpleNamespace(
        processing_class=tokenizer, _is_vlm=False, environment_factories=None, tools=[],
        chat_template=None, chat_template_kwargs={},
    )  # fmt: skip
    ids, _, _ = trl.GRPOTrainer._tokenize_prompts(trainer, [row["prompt"]])
    assert ids_of(row, tokenizer) == ids


def test_answers_of_a_tokenizer_without_an_end_are_refused(tokenizer, tmp_path):
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"rows\.jsonl:1: TRL ends an answer.*model\.tokenizer"):
        load("dpo", TEXTS, tokenizer, tmp_path)


def test_variables_reach_dpo(tmp_path):
    row = {"prompt": [ASK], "chosen": [YES], "rejected": [NO],
           "chat_template_kwargs": {"reasoning_effort": "low"}}  # fmt: skip
    tokenizer = tokenizer_of("gptoss")
    examples = load("dpo", row, tokenizer, tmp_path)
    row = trainer_of("dpo", examples, tokenizer, tmp_path).train_dataset[0]
    assert "Reasoning: low\n" in tokenizer.decode(row["prompt_ids"])


def test_rows_without_tools_stand_beside_rows_with_them(tokenizer, tmp_path):
    plain = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    rows = [plain, {**PREFERENCES["trl"], "chat_template_kwargs": {"a": 1}}, plain]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=str(file), max_length=4096)
    examples = load_stage_rows(STAGES["dpo"], section, tokenizer, seed=0)
    trained = trainer_of("dpo", examples, tokenizer, tmp_path).train_dataset
    texts = [tokenizer.decode(ids) for ids in trained["prompt_ids"]]
    asked = "<|im_start|>user\nWet?<|im_end|>\n<|im_start|>assistant\n"
    assert sorted(text == asked for text in texts) == [False, True, True]
    assert sum('"description": "Rain?"' in text for text in texts) == 1


def test_prompts_reach_grpo_as_the_template_takes_them(tokenizer, tmp_path):
    asked = {"prompt": [{"role": "human", "content": "Wet?"}], "system": "Be brief.", "answer": "7"}
    row = load("grpo", asked, tokenizer, tmp_path).train[0]
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert row["answer"] == "7" and text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWet?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_what_is_measured_is_what_is_judged(tokenizer, tmp_path):
    examples = load("dpo", PREFERENCES["trl"], tokenizer, tmp_path)
    row = examples.sources[0][1][0]
    learned = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(learned) == "Yes.<|im_end|>\n"  # as in the loss


@pytest.mark.parametrize(
    ("stage", "row", "said"),
    [
        ("dpo", {"prompt": [ASK], "chosen": [*CALLED[1:], YES], "rejected": [NO]},
         r"'chosen'\[1\]: a turn of 'tool', which would be learned.*'prompt'"),
        ("dpo", {"prompt": [ASK], "chosen": [{**YES, "train": False}], "rejected": [NO]},
         r"'chosen'\[0\]: this answer is marked as not learned"),
        ("dpo", {"prompt": [ASK], "chosen": [{**YES, "thinking": "So."}], "rejected": [NO]},
         r"turn 1: 'thinking': the chat template omits all or part"),
        ("grpo", {"prompt": [ASK], "images": ["a.png"]}, r"'images': only text can be"),
        ("grpo", {"prompt": [ASK], "tools": TOOLS}, r"'tools': TRL's GRPO does not read it"),
        ("dpo", {"prompt": [ASK], "chosen": [YES], "rejected": [NO], "tools": "{"}, "not JSON"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(tokenizer, tmp_path, stage, row, said):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{said}"):
        load(stage, row, tokenizer, tmp_path)


def test_columns_that_nothing_reads_are_named(tokenizer, tmp_path, caplog):
    load("dpo", {**PREFERENCES["trl"], "score": 3}, tokenizer, tmp_path)
    assert "train data: not used: score" in caplog.text


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_columns_of_conversations_that_texts_do_not_read_are_named(
    stage, tokenizer, tmp_path, caplog
):
    row = {"prompt": "Wet?", "chosen": " Yes.", "rejected": " No.", "answer": "7"}
    extras = {"system": "Be brief.", "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    load(stage, {**row, **extras}, tokenizer, tmp_path)
    unread = "chat_template_kwargs, system, tools"
    assert f"not used: {'answer, ' if stage == 'dpo' else ''}{unread}" in caplog.text
    caplog.clear()
    turns = {"asked": [ASK], "chosen": [YES], "rejected": [NO], "system": "Be brief."}
    load(stage, turns, tokenizer, tmp_path, columns={"prompt": "asked"})
    assert "system" not in caplog.text


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_a_beginning_that_trl_writes_twice_is_counted(stage, tmp_path, caplog):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    row = {"prompt": "Wet?", "chosen": " Yes.", "rejected": " No.", "answer": "7"}
    load(stage, row, tokenizer, tmp_path)
    assert "twice" not in caplog.text
    load(stage, {**row, "prompt": "<s>Wet?"}, tokenizer, tmp_path)
    assert "2 texts begin with the special token that TRL adds, so they have it" in caplog.text


@pytest.mark.parametrize(
    ("name", "counted"), [("glm4moe", True), ("glm4moe_training", False), ("qwen3", False)]
)
@pytest.mark.parametrize("answer", [YES, OPENAI["messages"][1]], ids=["words", "call"])
def test_answers_without_an_end_are_counted_in_preferences_too(
    name, counted, answer, tmp_path, caplog
):
    """GLM-4.5 writes an answer's end with the next turn; a closing tag ends no turn."""
    tokenizer = tokenizer_of(name)
    tags = ["</think>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    row = {"prompt": [ASK], "chosen": [answer], "rejected": [NO], "tools": TOOLS}
    load("dpo", row, tokenizer, tmp_path)
    assert ("does not learn where to stop" in caplog.text) is counted


def test_malformed_preferences_are_dropped_where_the_recipe_says_so(tokenizer, tmp_path, caplog):
    good = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    unread = {**good, "chosen": [{**YES, "reasoning_content": "It rains."}]}  # by the template
    lines = [json.dumps(row) for row in (good, {**good, "rejected": []}, unread, good)]
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    section = DataSection(train=str(tmp_path / "mixed.jsonl"))
    with pytest.raises(DataError, match=r"mixed\.jsonl:2: .*; data\.malformed: drop"):
        load_stage_rows(STAGES["dpo"], section, tokenizer, seed=0)
    dropping = section.model_copy(update={"malformed": "drop"})
    with caplog.at_level("WARNING", "moe_finetune"):
        train = load_stage_rows(STAGES["dpo"], dropping, tokenizer, seed=0).train
    assert train.to_list() == load("dpo", good, tokenizer, tmp_path).train.to_list()
    assert "2 rows are malformed and were dropped; the first: " in caplog.text
    assert "mixed.jsonl:2: " in caplog.text


def test_a_limit_counts_the_rows_of_all_sources(tokenizer, tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        rows = [{"prompt": f"{file.stem}{n}", "chosen": "y", "rejected": "n"} for n in range(3)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=[str(file) for file in files], limit=4)
    loaded = load_stage_rows(STAGES["dpo"], section, tokenizer, seed=0)
    assert len(loaded.train) == 4
    assert sum(len(rows) for _, rows in loaded.sources) == 4


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_fields_of_turns_that_nothing_reads_are_counted(stage, tokenizer, tmp_path, caplog):
    ask = {**ASK, "note": 3}
    rows = {
        "dpo": {"prompt": [ask], "chosen": [{**YES, "why": "x"}], "rejected": [{**NO, "loss": 1}]},
        "grpo": {"prompt": [ask, {**YES, "trainable": 0, "why": "x"}, ASK]},
    }
    load(stage, rows[stage], tokenizer, tmp_path)
    unread = "train data: fields of turns not used: note (in 2 turns), why (in 2 turns)"
    assert unread in caplog.messages
    hidden = "train data: 2 answers are not learned, because of their field 'trainable'"
    assert (hidden in caplog.messages) is (stage == "grpo")


@pytest.mark.parametrize("prompt", ["Wet?", None])
def test_preferences_of_a_text_and_whole_chats(prompt, tokenizer, tmp_path):
    """UltraFeedback's layout."""
    row = {"prompt": prompt, "chosen": [ASK, YES], "rejected": [ASK, NO], "score_chosen": 8.5}
    if prompt is None:
        with pytest.raises(DataError, match=r"rows\.jsonl:1: 'prompt' is null; remove the row"):
            load("dpo", row, tokenizer, tmp_path)
        return
    plain = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    (tmp_path / "plain").mkdir()
    tables = [load("dpo", row, tokenizer, tmp_path),
              load("dpo", plain, tokenizer, tmp_path / "plain")]  # fmt: skip
    first, second = (table.train.to_list() for table in tables)
    assert [{k: r[k] for k in plain} for r in first] == [{k: r[k] for k in plain} for r in second]
    answers = {"prompt": "Wet?", "chosen": [YES], "rejected": [NO]}
    (tmp_path / "answers").mkdir()
    third = load("dpo", answers, tokenizer, tmp_path / "answers").train.to_list()
    assert third == second
    with pytest.raises(DataError, match="'prompt' is a text with which 'chosen' and 'rejected' do"):
        load("dpo", {**row, "prompt": "Dry?"}, tokenizer, tmp_path)
    with pytest.raises(DataError, match="'rejected' is null"):
        load("dpo", {**row, "rejected": None}, tokenizer, tmp_path)


def test_prompts_keep_numbers_and_types_that_a_table_has_not(tokenizer, tmp_path):
    rows = [
        {"prompt": [ASK], "hash": 2**64 - 5, "kind": "a", "reward_model": {"ground_truth": "7"}},
        {"prompt": [ASK], "hash": -1, "kind": 3, "reward_model": {"ground_truth": "8"}},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"answer": "reward_model.ground_truth"}
    data = DataSection(train=str(file), columns=columns)
    table = load_stage_rows(STAGES["grpo"], data, tokenizer, seed=0, rewards=["exact_match"]).train
    by_answer = {row["answer"]: row for row in table}
    assert [by_answer[name]["hash"] for name in "78"] == [2**64 - 5, -1]
    assert [by_answer[name]["kind"] for name in "78"] == ["a", 3]
    data = DataSection(train=str(file), columns={"answer": "reward_model.truth"})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no field 'reward_model\.truth'"):
        load_stage_rows(STAGES["grpo"], data, tokenizer, seed=0)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_number_that_is_none_is_refused_where_it_is_read(value, tokenizer, tmp_path):
    row = '{"prompt": "Wet?", "answer": 7, "score": %s}\n'
    file = tmp_path / "rows.jsonl"
    file.write_text((row % "1.5") + (row % value))
    data = DataSection(train=str(file))
    rows = load_stage_rows(STAGES["grpo"], data, tokenizer, seed=0, rewards=["exact_match"]).train
    assert len(rows) == 2
    file.write_text(file.read_text().replace("7, ", f"{value}, "))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'answer': must be text or a number"):
        load_stage_rows(STAGES["grpo"], data, tokenizer, seed=0, rewards=["exact_match"])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_preferences_whose_conversation_the_assistant_opens(name, tmp_path):
    """Also the rows on which routing is measured: their answer is located."""
    hello = {"role": "assistant", "content": "Hello."}
    row = {"prompt": [hello, ASK], "chosen": [YES], "rejected": [NO]}
    tokenizer = tokenizer_of(name)
    examples = load("dpo", row, tokenizer, tmp_path)
    labels = examples.sources[0][1][0]["labels"]
    text = tokenizer.decode([label for label in labels if label >= 0])
    assert "Yes." in text and "Hello" not in text and "Wet" not in text
