import gzip
import json
import logging
import re
import tracemalloc

import pytest
from tokenizers.processors import TemplateProcessing

from moe_finetune.data.rows import Former
from moe_finetune.data.sources import draw, read_rows
from moe_finetune.data.tokenize import CHAT_TEMPLATES, IGNORED, tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from moe_finetune.training.preview import marked
from tests.data.loading import load_dataset_for, prepare
from tests.support import tiny

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei – né."},
]
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


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def write(tmp_path):
    def write(name: str, rows: list) -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


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


# -- labels -----------------------------------------------------------------------------------


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


# -- files ------------------------------------------------------------------------------------


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


# -- datasets ---------------------------------------------------------------------------------


def texts(rows) -> list[dict]:
    return [{"text": f"{i:02d} " + "word " * (i % 7)} for i in range(rows)]


def test_a_list_of_texts_is_filled_in_with_one_a_line():
    former = Former(template={"prompt": "{task}\n{tests}\n[BEGIN]", "completion": "{code}"})
    row = {"task": "add", "tests": ["assert f(1, 2) == 3", "assert f(0, 4) == 4"], "code": "def f"}
    assert former("a:1", row) == {
        "prompt": "add\nassert f(1, 2) == 3\nassert f(0, 4) == 4\n[BEGIN]",
        "completion": "def f",
    }


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
    assert (
        "1 rows are longer than data.max_length 8 and were truncated by 6 tokens in total" in said
    )
    assert "1 rows are longer than data.max_length 8 and were dropped" in said
    section = DataSection(train=source, max_length=8, overlong="drop")
    assert len(prepare(source, section, tokenizer, "train")) == 1
    section = DataSection(train=source, max_length=8, overlong="error")
    with pytest.raises(
        DataError, match=r"long\.jsonl:2: 14 tokens, longer than data\.max_length 8"
    ):
        prepare(source, section, tokenizer, "train")
    only_long = write("only.jsonl", rows[2:])
    with pytest.raises(DataError, match="none of the 1 rows has a learned token"):
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
        assert "1 rows end with turns that no answer follows; those turns were" in caplog.text
        assert "1 rows have no answer to learn and were dropped" in caplog.text
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
    with pytest.raises(DataError, match=r"all 2 rows are malformed; the first: .*b\.jsonl:1: "):
        load_dataset_for(only, tokenizer, 0)


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


# -- real data --------------------------------------------------------------------------------


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
        noted = "1 rows already have the special token that begins or ends a text" in caplog.text
        assert noted is ("'<s>" in written or "</s>'" in written or "</s>\\n'" in written)


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


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,source\nhi," + "x" * 150_000 + "\n")
    (row,) = (row for _, row in read_rows(str(file)))
    assert len(row["source"]) == 150_000
