"""Rows as examples: what of them is learned, which are dropped, and in which order."""

import json
import logging
import re
import tracemalloc

import pytest
from tokenizers.processors import TemplateProcessing

from moe_finetune.data.sources import draw
from moe_finetune.data.tokenize import CHAT_TEMPLATES, IGNORED, tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.training.before.preview import marked
from tests.data.loading import CHAT, load_dataset_for, prepare, texts
from tests.support import tiny

REWRITING = (  # keeps the thought of the last answer only, as reasoning models' templates do
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 and m['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m['role'] }}: "
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def learned(tokenizer, ids, labels) -> str:
    """Text of the learned tokens, ``|`` between runs."""
    runs, open_run = [], False
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, IGNORED)
        if label == IGNORED:
            open_run = False
        elif open_run:
            runs[-1].append(token)
        else:
            runs.append([token])
            open_run = True
    return "|".join(tokenizer.decode(run) for run in runs)


def test_a_chat_learns_every_answer_and_its_end(tokenizer):
    tokens = tokenize_row({"messages": CHAT}, tokenizer, completion_only=True)
    said = learned(tokenizer, tokens.input_ids, tokens.labels)
    assert said == "Eins.<|im_end|>|Zwei – né.<|im_end|>"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert tokens.input_ids == whole and not tokens.rewritten


def test_labels_equal_the_templates_own_generation_tags(tokenizer):
    tokens = tokenize_row({"messages": CHAT}, tokenizer, completion_only=True)
    tagged = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert [label != IGNORED for label in tokens.labels] == list(
        map(bool, tagged["assistant_masks"])
    )


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_built_in_templates_learn_answers_without_tags(tokenizer, name):
    tokenizer.chat_template = CHAT_TEMPLATES[name]
    tokens = tokenize_row({"messages": CHAT}, tokenizer, completion_only=True)
    end = {"chatml": "<|im_end|>", "plain": "<|endoftext|>"}[name]
    space = {"chatml": "", "plain": " "}[name]
    said = learned(tokenizer, tokens.input_ids, tokens.labels)
    assert said == f"{space}Eins.{end}|{space}Zwei – né.{end}"


def test_rewritten_history_learns_the_last_answer_and_says_so(tokenizer):
    tokenizer.chat_template = REWRITING
    tokens = tokenize_row({"messages": CHAT}, tokenizer, completion_only=True)
    said = learned(tokenizer, tokens.input_ids, tokens.labels)
    assert said == "<think></think>Zwei – né.<|im_end|>" and tokens.rewritten


def test_a_completion_learns_itself_and_the_end(tokenizer):
    row = {"prompt": "Question: 1+1?\nAnswer:", "completion": " 2"}
    tokens = tokenize_row(row, tokenizer, completion_only=True)
    assert learned(tokenizer, tokens.input_ids, tokens.labels) == " 2<|endoftext|>"
    assert tokenizer.decode(tokens.input_ids) == "Question: 1+1?\nAnswer: 2<|endoftext|>"


def test_a_text_learns_all_and_its_end_is_not_doubled(tokenizer):
    for text in ("plain text", "plain text<|endoftext|>"):
        tokens = tokenize_row({"text": text}, tokenizer, completion_only=True)
        assert tokens.labels == tokens.input_ids
        assert tokenizer.decode(tokens.input_ids) == "plain text<|endoftext|>"


def test_completion_only_off_learns_prompts_too(tokenizer):
    for row in ({"messages": CHAT}, {"prompt": "a", "completion": "b"}):
        tokens = tokenize_row(row, tokenizer, completion_only=False)
        assert tokens.labels == tokens.input_ids


def test_a_token_across_the_border_is_learned_and_counted():
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(BPE(vocab={"a": 0, "b": 1, "c": 2, "bc": 3, "</s>": 4}, merges=[("b", "c")]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    merging = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokens = tokenize_row({"prompt": "ab", "completion": "ca"}, merging, completion_only=True)
    assert tokens.input_ids == [0, 3, 0, 4]
    assert tokens.labels == [IGNORED, 3, 0, 4] and tokens.straddled


def test_missing_and_refusing_templates_are_named(tokenizer, write):
    source = write("c.jsonl", [{"messages": CHAT}])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"c\.jsonl:1: .*no chat template.*chatml, plain"):
        load_dataset_for(DataSection(train=source), tokenizer, 0)
    train, _ = load_dataset_for(DataSection(train=source, chat_template="chatml"), tokenizer, 0)
    assert len(train) == 1 and tokenizer.chat_template == CHAT_TEMPLATES["chatml"]
    with pytest.raises(DataError, match="did you mean 'chatml'"):
        load_dataset_for(DataSection(train=source, chat_template="chatlm"), tokenizer, 0)
    tokenizer.chat_template = "{{ raise_exception('only users here') }}"
    with pytest.raises(DataError, match="only users here"):
        load_dataset_for(DataSection(train=source), tokenizer, 0)


def test_order_is_fixed_by_the_seed(write, tokenizer):
    source = write("t.jsonl", texts(40))

    def order(run_seed, **options):
        train, _ = load_dataset_for(DataSection(train=source, **options), tokenizer, run_seed)
        return [tokenizer.decode(row[:2]) for row in train["input_ids"]]

    assert order(3) == order(3) != order(4)
    assert sorted(order(3)) == [f"{i:02d}" for i in range(40)]
    assert order(3) == order(9, seed=3), "data.seed wins over the run's"


def test_processes_do_not_change_the_order(write, tokenizer, monkeypatch, tmp_path):
    section = DataSection(train=write("t.jsonl", texts(11)))
    one = prepare(section.train, section, tokenizer, "train")
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "other"))  # or it is found there
    two = prepare(section.train, section.model_copy(update={"num_proc": 2}), tokenizer, "train")
    assert one.to_list() == two.to_list()


def test_cut_and_left_out_rows_are_counted_and_said(write, tokenizer, caplog):
    rows = [
        {"prompt": "p" * 4, "completion": "c" * 3},  # 8 tokens with the end: fits
        {"prompt": "p" * 4, "completion": "c" * 9},  # 14: cut by 6
        {"prompt": "p" * 10, "completion": "c"},  # nothing learned within 8: left out
    ]
    source = write("long.jsonl", rows)
    with caplog.at_level(logging.INFO, "moe_finetune"):
        kept = prepare(source, DataSection(train=source, max_length=8), tokenizer, "train")
    assert [len(ids) for ids in kept["input_ids"]] == [8, 8]
    said = caplog.text
    assert "3 rows, 16 tokens, 8 of them learned" in said
    assert "1 row is longer than data.max_length 8 and was truncated by 6 tokens in total" in said
    assert "1 row is longer than data.max_length 8 and was dropped" in said
    section = DataSection(train=source, max_length=8, overlong="drop")
    assert len(prepare(source, section, tokenizer, "train")) == 1
    section = DataSection(train=source, max_length=8, overlong="error")
    with pytest.raises(
        DataError, match=r"long\.jsonl:2: 14 tokens, longer than data\.max_length 8"
    ):
        prepare(source, section, tokenizer, "train")
    only_long = write("only.jsonl", rows[2:])
    with pytest.raises(DataError, match="of 1 row, none has a learned token"):
        load_dataset_for(DataSection(train=only_long, max_length=8), tokenizer, 0)


def test_turns_that_no_answer_follows_are_dropped_and_reported(write, tokenizer, caplog):
    """Published conversations end where the user stopped."""
    question = {"role": "user", "content": "And then?"}
    rows = [{"messages": [*CHAT, question]}, {"messages": [question]}, {"messages": CHAT}]
    source = write("c.jsonl", rows)
    for turns, copies in (("all", 1), ("each", sum(t["role"] == "assistant" for t in CHAT))):
        caplog.clear()
        with caplog.at_level(logging.INFO, "moe_finetune"):
            section = DataSection(train=source, turns=turns)
            kept = prepare(source, section, tokenizer, "train").to_list()
        assert len(kept) == 2 * copies and kept[:copies] == kept[copies:]
        assert "1 row ends with turns that no answer follows; those turns were" in caplog.text
        assert "1 row has no answer to learn and was dropped" in caplog.text
    everything = DataSection(train=source, completion_only_loss=False)
    texts = [
        tokenizer.decode(ids)
        for ids in prepare(source, everything, tokenizer, "train")["input_ids"]
    ]
    assert [text.count("And then?") for text in texts] == [1, 1, 0]


@pytest.mark.parametrize(
    ("bad", "template"),
    [
        ({"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, None),
        ({"messages": "hello"}, None),
        ({"messages": [CHAT[1], CHAT[1], CHAT[2]]}, ALTERNATING),
    ],
    ids=["an empty answer", "no turns", "a template that wants alternating roles"],
)
def test_malformed_rows_are_dropped_where_the_recipe_says_so(
    write, tokenizer, tmp_path, caplog, bad, template
):
    good = [{"messages": CHAT}, {"messages": [CHAT[1], {**CHAT[2], "content": "Other."}]}]
    source = write("c.jsonl", [good[0], bad, good[1], bad])
    if template:
        (tmp_path / "strict.jinja").write_text(template)
    options = {"chat_template": str(tmp_path / "strict.jinja")} if template else {}
    with pytest.raises(DataError, match=r"c\.jsonl:2: .*; data\.malformed: drop drops and counts"):
        load_dataset_for(DataSection(train=source, **options), tokenizer, 0)
    section = DataSection(train=source, malformed="drop", validation=source, **options)
    with caplog.at_level(logging.INFO, "moe_finetune"):
        train, validation = load_dataset_for(section, tokenizer, 0)
    clean = DataSection(train=write("g.jsonl", good), **options)
    expected, _ = load_dataset_for(clean, tokenizer, 0)
    assert train.to_list() == expected.to_list() and len(validation) == 2
    assert "train data: 2 rows, " in caplog.text
    first = r"train data: 2 rows are malformed and were dropped; the first: \S*c\.jsonl:2: "
    assert re.search(first, caplog.text)
    only = DataSection(train=write("b.jsonl", [bad, bad]), malformed="drop", **options)
    with pytest.raises(DataError, match=r"every row is malformed \(2\); the first: .*b\.jsonl:1: "):
        load_dataset_for(only, tokenizer, 0)


@pytest.mark.more
def test_a_long_reason_takes_its_length_once(write, tokenizer):
    tokenizer.chat_template = ALTERNATING.replace("'roles must alternate'", "m['content']")
    bad = {"messages": [CHAT[1], {**CHAT[1], "content": "x" * 400_000}, CHAT[2]]}
    source = write("c.jsonl", [{"messages": CHAT}, bad, *[{"messages": CHAT[1:]}] * 300])
    tracemalloc.start()
    try:
        rows = prepare(source, DataSection(train=source, malformed="drop"), tokenizer, "train")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(rows) == 301
    assert most < 200e6  # of an array of such texts, each row would take 1.6 MB


def test_splitting_strategies_keep_long_texts_and_refuse_chats(write, tokenizer):
    source = write("t.jsonl", [{"text": "word " * 30}])
    split = DataSection(train=source, max_length=8, packing=True, packing_strategy="bfd_split")
    assert len(prepare(source, split, tokenizer, "train")[0]["input_ids"]) == 151
    chats = write("c.jsonl", [{"messages": CHAT}])
    with pytest.raises(DataError, match="splits examples; set it to 'bfd'"):
        prepare(chats, split, tokenizer, "train")
    masked = DataSection(train=source, completion_only_loss=True)
    with pytest.raises(DataError, match="contains plain texts, which have no completion to"):
        prepare(source, masked, tokenizer, "train")


@pytest.mark.parametrize("packing", [False, True])
def test_trl_takes_the_labels_as_they_are(write, tokenizer, tmp_path, packing):
    """What reaches the model: every learned token of the file, and no other."""
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": f"ask {i} " * (i + 1), "completion": f"say {i}"} for i in range(6)]
    train, _ = load_dataset_for(
        DataSection(train=write("r.jsonl", rows), max_length=64), tokenizer, 0
    )
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"), max_length=64, packing=packing, report_to="none",
        use_cpu=True, bf16=False, per_device_train_batch_size=2, router_aux_loss_coef=0.0,
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny.model("olmoe"), args=arguments, train_dataset=train, processing_class=tokenizer
    )
    seen = []
    for batch in trainer.get_train_dataloader():
        labels = batch["labels"]
        assert ((labels == batch["input_ids"]) | (labels == IGNORED)).all()
        seen.append(tokenizer.decode(labels[labels != IGNORED]))
    said = "".join(seen)
    assert sorted(said.split("<|endoftext|>")) == sorted(["", *(f"say {i}" for i in range(6))])


def test_gsm8k(data_file, tokenizer):
    source = str(data_file("gsm8k_train.jsonl"))
    train, _ = load_dataset_for(DataSection(train=source, limit=50), tokenizer, 1)
    for ids, labels in zip(train["input_ids"], train["labels"], strict=True):
        assert tokenizer.decode(ids).startswith("Question: ")
        answer = learned(tokenizer, ids, labels)
        assert answer.endswith("<|endoftext|>") and "#### " in answer and "Question" not in answer


@pytest.mark.parametrize("task", ["intent", "law"])
def test_esft(data_file, tokenizer, task):
    path = data_file(f"esft_{task}_train.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    data = prepare(
        str(path), DataSection(train=str(path), limit=60, max_length=9000), tokenizer, "train"
    )
    rows = [row for _, row in draw(((str(i), row) for i, row in enumerate(rows)), 60, 0, "")]
    for row, ids, labels in zip(rows, data["input_ids"], data["labels"], strict=True):
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        said = learned(tokenizer, ids, labels)
        assert said == "|".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "hi"}, "⟦<s>hi</s>⟧"),
        ({"text": "<s>hi</s>"}, "⟦<s>hi</s>⟧"),
        ({"text": "<s>hi</s>\n"}, "⟦<s>hi</s>\n⟧"),
        ({"text": "<s><s>hi"}, "⟦<s><s>hi</s>⟧"),
        ({"text": "hi</s> no"}, "⟦<s>hi</s> no</s>⟧"),
        ({"prompt": "<s>hi", "completion": "lo</s>"}, "<s>hi⟦lo</s>⟧"),
        ({"prompt": "hi", "completion": "lo"}, "<s>hi⟦lo</s>⟧"),
    ],
)
def test_a_text_has_one_beginning_and_one_end(row, text, tmp_path, caplog):
    """As many as it has where it has them: it was rendered before."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    ids = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    for single in ("<s> $A", "<s> $A </s>"):
        processor = TemplateProcessing(single=single, special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = processor
        tokens = tokenize_row(row, tokenizer, True)
        assert marked(tokens.input_ids, tokens.labels, tokenizer, ("⟦", "⟧")) == text
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        caplog.clear()
        load_dataset_for(DataSection(train=str(file)), tokenizer, 0)
        written = str(row)
        noted = "1 row already has the special token that begins or ends a text" in caplog.text
        assert noted is ("'<s>" in written or "</s>'" in written or "</s>\\n'" in written)
