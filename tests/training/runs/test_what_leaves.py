"""What leaves a run is what was trained with, and no save fails for a reason known at the start."""

import json
import shutil

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from moe_finetune import cli
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.tokenizer_files import without_generation
from moe_finetune.data.tokenize import CHAT_TEMPLATES
from moe_finetune.errors import AdapterError, CheckpointError, DataError
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.run import plan_run, run_recipe
from tests.checkpoint.helpers import adapter
from tests.support import tiny
from tests.support.recipes import recipe_of

CHAT = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(7)
]
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def edit(file, drop=(), **values):
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {k: v for k, v in {**content, **values}.items() if k not in drop}
    file.write_text(json.dumps(content))


@pytest.fixture
def base(tmp_path):
    """As the published base models: no chat template, and three end tokens for generation."""
    folder = tmp_path / "qwen3_moe"
    tiny.save("qwen3_moe", folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", drop=("chat_template",))
    edit(folder / "generation_config.json", eos_token_id=[0, 7, 9], temperature=0.5, do_sample=True)
    write_jsonl(tmp_path / "chat.jsonl", CHAT)
    return folder


def recipe(base, data=None, **sections):
    chats = {"chat_template": "chatml", "max_length": 2048, **(data or {})}
    return recipe_of(base, base.parent / "chat.jsonl", data=chats, **sections)


@pytest.mark.parametrize("lora", [{}, None], ids=["adapter", "whole"])
def test_the_template_and_its_end_token_leave_with_the_weights(base, tmp_path, lora):
    """Chats were answered 400, and an answer did not end."""
    edit(base / "config.json", rope_theta=5e6, use_cache=True, router_aux_loss_coef=0.002)
    edit(base / "generation_config.json", do_sample=False)  # with a temperature: not to be saved
    sections = {"trainer": {"save_steps": 1}}
    run = RunFolder(run_recipe(recipe(base, lora=lora, **sections), tmp_path / "run"))
    merged = load_tokenizer(run.merged)
    assert merged.chat_template == CHAT_TEMPLATES["chatml"]
    assert merged.apply_chat_template(CHAT[0]["messages"], tokenize=False).endswith("!<|im_end|>\n")
    config = json.loads((run.merged / "config.json").read_text())
    stored = json.loads((base / "config.json").read_text())
    same = {key: value for key, value in stored.items() if key != "dtype"}
    assert {key: config[key] for key in same} == same and config.keys() - {"dtype"} == same.keys()
    generation = json.loads((run.merged / "generation_config.json").read_text())
    assert generation.pop("eos_token_id") == [0, 2, 7, 9]
    assert generation == {"temperature": 0.5, "do_sample": False} | {
        key: generation[key] for key in generation if key not in ("temperature", "do_sample")
    }
    assert (run.merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    with torch.no_grad():
        logits = load_model(run.merged, dtype="float32")(input_ids=torch.arange(4, 9)[None]).logits
    assert torch.isfinite(logits).all()
    if lora is not None:
        assert load_tokenizer(run.adapter).chat_template == CHAT_TEMPLATES["chatml"]
        settings = json.loads((run.adapter / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] != "TokenizersBackend"


def test_without_a_change_every_small_file_is_the_bases(base, tmp_path):
    write_jsonl(tmp_path / "chat.jsonl", [{"text": f"{n} words " * 3} for n in range(6)])
    run = RunFolder(run_recipe(recipe(base, data={"chat_template": None}), tmp_path / "run"))
    for name in SMALL:
        assert (run.merged / name).read_bytes() == (base / name).read_bytes(), name


def test_a_template_file_leaves_without_the_marks_of_training(base, tmp_path):
    marked = (
        "{% for m in messages %}[{{ m.role }}] {%- if m.role == 'assistant' -%}"
        "{%- generation -%} {{ m.content }}<|im_end|> {%- endgeneration -%}"
        "{%- else -%} {{ m.content }} {%- endif -%}{% endfor %}"
    )
    (tmp_path / "mine.jinja").write_text(marked)
    chosen = recipe(base, data={"chat_template": str(tmp_path / "mine.jinja")})
    run = RunFolder(run_recipe(chosen, tmp_path / "run"))
    template = (run.merged / "chat_template.jinja").read_text()
    assert template == without_generation(marked) and "generation" not in template
    messages = CHAT[3]["messages"]
    text = jinja2.Environment().from_string(template).render(messages=messages)
    assert text == "[user]3?[assistant]3!<|im_end|>"


def test_a_tokenizer_from_elsewhere_leaves_too(base, tmp_path):
    other = tmp_path / "tokenizer"
    tiny.tokenizer().save_pretrained(other)
    for file in (*base.glob("tokenizer*"), *base.glob("special*")):
        file.unlink()
    chosen = recipe(base, model={"tokenizer": str(other)}, data={"chat_template": None})
    run = RunFolder(run_recipe(chosen, tmp_path / "run"))
    assert load_tokenizer(run.merged).chat_template == load_tokenizer(other).chat_template
    assert load_tokenizer(run.merged).get_vocab() == load_tokenizer(other).get_vocab()


def test_an_adapters_tokenizer_goes_into_its_merge_where_it_says_something_else(base, tmp_path):
    """As the folders of Unsloth, axolotl and LLaMA-Factory."""
    trained = adapter(base, tmp_path / "trained")
    plain = merge_adapter(base, trained, tmp_path / "plain")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, trained)
    edit(trained / "tokenizer_config.json", pad_token="<|endoftext|>", model_max_length=9)
    same = merge_adapter(base, trained, tmp_path / "same")
    assert same.small_files == plain.small_files and same.notes == plain.notes
    (trained / "chat_template.jinja").write_text(CHAT_TEMPLATES["chatml"])
    cut = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    edit(trained / "tokenizer.json", truncation=cut)
    other = merge_adapter(base, trained, tmp_path / "other")
    assert len(other.notes) == len(plain.notes) + 1
    assert "chat template of trained, not of the base; its truncation" in other.notes[-1]
    assert load_tokenizer(tmp_path / "other").chat_template == CHAT_TEMPLATES["chatml"]
    assert json.loads((tmp_path / "other" / "tokenizer.json").read_text())["truncation"] is None
    generation = json.loads((tmp_path / "other" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2, 7, 9] and generation["temperature"] == 0.5
    kept = merge_adapter(base, trained, tmp_path / "kept", tokenizer="base")
    assert kept.small_files == plain.small_files
    exchange = json.loads((trained / "tokenizer.json").read_text())
    for entry in exchange["added_tokens"]:
        entry["id"] = {1: 2, 2: 1}.get(entry["id"], entry["id"])
    vocabulary = exchange["model"]["vocab"]
    if "<|im_end|>" in vocabulary:
        vocabulary["<|im_end|>"], vocabulary["<|im_start|>"] = 1, 2
    (trained / "tokenizer.json").write_text(json.dumps(exchange))
    with pytest.raises(AdapterError, match=r"its tokenizer has '<\|im_.*--tokenizer base"):
        merge_adapter(base, trained, tmp_path / "no")
    command = ["merge", str(trained), "--base", str(base), "--output", str(tmp_path / "yes")]
    assert cli.main([*command]) == 2
    assert cli.main([*command, "--tokenizer", "adapter"]) == 0


def test_a_template_without_a_tokenizer_goes_into_the_merge(base, tmp_path):
    """As a folder from which only some files were kept."""
    trained = adapter(base, tmp_path / "trained")
    plain = merge_adapter(base, trained, tmp_path / "plain")
    with pytest.raises(AdapterError, match="has no tokenizer; leave --tokenizer out"):
        merge_adapter(base, trained, tmp_path / "no", tokenizer="adapter")
    (trained / "chat_template.jinja").write_text(CHAT_TEMPLATES["chatml"])
    made = merge_adapter(base, trained, tmp_path / "template")
    assert made.notes[-1] == "tokenizer: chat template of trained, not of the base"
    assert load_tokenizer(tmp_path / "template").chat_template == CHAT_TEMPLATES["chatml"]
    generation = json.loads((tmp_path / "template" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2, 7, 9]
    assert merge_adapter(base, trained, tmp_path / "b", tokenizer="base").notes == plain.notes
    (trained / "chat_template.jinja").unlink()
    template = [{"name": "default", "template": CHAT_TEMPLATES["chatml"]}]
    edit(trained / "tokenizer_config.json", chat_template=template, eos_token="<|im_end|>")
    made = merge_adapter(base, trained, tmp_path / "settings")
    assert made.notes[-1].startswith("tokenizer: chat template, end token '<|im_end|>' of trained")
    merged = load_tokenizer(tmp_path / "settings")
    assert (merged.chat_template, merged.eos_token) == (CHAT_TEMPLATES["chatml"], "<|im_end|>")
    assert merged.get_vocab() == load_tokenizer(base).get_vocab()
    edit(trained / "tokenizer_config.json", eos_token="<other>")
    with pytest.raises(AdapterError, match="the base's tokenizer has no token '<other>'"):
        merge_adapter(base, trained, tmp_path / "no")
    (trained / "vocab.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"vocab\.json is of a tokenizer without"):
        merge_adapter(base, trained, tmp_path / "no")
    (base / "vocab.json").write_text("{}")
    edit(trained / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    assert "end token" in merge_adapter(base, trained, tmp_path / "same").notes[-1]


def test_a_tokenizer_of_another_model_is_refused(base, tmp_path):
    trained = adapter(base, tmp_path / "trained")
    words = {**{f"w{i}": i for i in range(50)}, "[UNK]": 50}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), eos_token="w0"
    ).save_pretrained(trained)
    with pytest.raises(AdapterError, match=r"has 0 of the \d+ tokens of the base's"):
        merge_adapter(base, trained, tmp_path / "no")
    large = load_tokenizer(base)
    large.add_tokens([f"<x{i}>" for i in range(300)])
    large.save_pretrained(trained)
    for file in base.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(AdapterError, match=r"but the embedding has \d+ rows"):
        merge_adapter(base, trained, tmp_path / "no")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "contains list instead of an object"),
        ('{"eos_token_id": 0,}', "not JSON"),
        ("", "not JSON"),
        ('{"eos_token_id": "0"}', 'eos_token_id is "0", not a token id'),
        ('{"eos_token_id": 0.0}', "eos_token_id is 0.0, not"),
        ('{"eos_token_id": [0, null]}', r"eos_token_id is \[0, null\], not"),
    ],
)
def test_settings_of_generation_are_read_at_the_start(base, tmp_path, content, said):
    trained = adapter(base, tmp_path / "trained")
    (base / "generation_config.json").write_text(content)
    for call in (
        lambda: plan_run(recipe(base), tmp_path / "run"),
        lambda: merge_adapter(base, trained, tmp_path / "no", dry_run=True),
        lambda: load_model(base),
    ):
        with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{said}"):
            call()


# -- known at the start ---------------------------------------------------------------------------


def shrink_embedding(base, rows):
    file = base / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:rows].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    edit(base / "config.json", vocab_size=rows)


@pytest.mark.parametrize("case", ["in a row", "the padding", "unused"])
def test_a_token_without_a_row_in_the_embedding_is_refused(base, tmp_path, case):
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(["<custom>"])
    if case == "the padding":
        tokenizer.pad_token = "<custom>"
    tokenizer.save_pretrained(base)
    rows = tiny.model("qwen3_moe").config.vocab_size
    shrink_embedding(base, min(rows, len(tokenizer) - 1))
    word = "<custom>" if case == "in a row" else "custom"
    write_jsonl(tmp_path / "chat.jsonl", [{"text": f"{n} {word} " * 3} for n in range(6)])
    chosen = recipe(base, data={"chat_template": None})
    if case == "unused":
        plan_run(chosen, tmp_path / "run")
        return
    with pytest.raises(DataError, match=r"token 260 \('<custom>'\), but the checkpoint's emb"):
        plan_run(chosen, tmp_path / "run")


PREFERENCES = [{"prompt": f"{n}?", "chosen": " yes", "rejected": " no"} for n in range(6)]
PAIRS = [{"prompt": f"{n}?", "completion": " yes"} for n in range(6)]


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("pad_token", PREFERENCES, {"stage": "dpo"}),
        ("eos_token", PREFERENCES, {"stage": "dpo"}),
        ("pad_token", [{"prompt": f"{n}?", "answer": "4"} for n in range(6)],
         {"stage": "grpo", "rewards": ["exact_match"],
          "trainer": {"num_generations": 2, "gradient_accumulation_steps": 2}}),
        ("pad_token", PAIRS, {"trainer": {"pad_to_multiple_of": 64}}),
        ("pad_token", PAIRS, {"data": {"packing": True},
                              "trainer": {"pad_to_multiple_of": 64}}),
        ("pad_token", PAIRS, {}),
    ],
    ids=["dpo", "end of dpo", "grpo", "multiple", "packed multiple", "none"],
)  # fmt: skip
def test_what_a_batch_of_one_row_adds_has_a_row_too(base, tmp_path, name, rows, options):
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(["<custom>"])
    setattr(tokenizer, name, "<custom>")
    tokenizer.save_pretrained(base)
    shrink_embedding(base, len(tokenizer) - 1)
    write_jsonl(tmp_path / "chat.jsonl", rows)
    sections = {"data": {"chat_template": None}, "trainer": {"per_device_train_batch_size": 1}}
    chosen = recipe(base, **{key: {**sections[key], **options.get(key, {})} for key in sections},
                    **{key: options[key] for key in options.keys() - sections.keys()})  # fmt: skip
    if not options:
        plan_run(chosen, tmp_path / "run")
        return
    with pytest.raises(
        DataError, match=r"token 260 \('<custom>'\), but the checkpoint's emb"
    ) as one:
        plan_run(chosen, tmp_path / "run")
    has_key = name == "pad_token" and chosen.stage != "grpo"
    assert ("trainer.pad_token" in str(one.value)) == has_key, "a remedy that the stage accepts"


def test_prompts_of_a_rollout_are_compared_too(base, tmp_path):
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(["<custom>"])
    tokenizer.save_pretrained(base)
    shrink_embedding(base, len(tokenizer) - 1)
    rows = [{"prompt": f"{n} <custom>", "answer": "4"} for n in range(6)]
    write_jsonl(tmp_path / "chat.jsonl", rows)
    chosen = recipe(
        base,
        stage="grpo",
        rewards=["exact_match"],
        data={"chat_template": None},
        trainer={"num_generations": 2, "max_completion_length": 4},
    )
    with pytest.raises(DataError, match=r"the data have token 260"):
        plan_run(chosen, tmp_path / "run")


def test_a_file_that_cannot_be_copied_at_the_end_is_refused_at_the_start(base, tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (base / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        plan_run(recipe(base), tmp_path / "run")
    alone = {"export": {"merge": False}}
    plan_run(recipe(base, **alone), tmp_path / "run")  # an adapter has only the tokenizer's
    (tmp_path / "elsewhere.json").write_bytes((base / "tokenizer_config.json").read_bytes())
    (base / "tokenizer_config.json").unlink()
    (base / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: is a link"):
        plan_run(recipe(base, **alone), tmp_path / "run")
