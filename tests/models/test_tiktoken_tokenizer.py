"""Moonlight's tokenizer files without their code, against the tiktoken library itself."""

import json
import random

import pytest
import tiktoken

from moe_finetune.errors import CheckpointError
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.models.tiktoken_tokenizer import PATTERN, load_tiktoken
from tests.models import moonlight_files


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v3")
    ranks = moonlight_files.write(folder)
    named = {len(ranks) + offset: name for offset, name in moonlight_files.NAMED.items()}
    specials = {
        named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)
    }
    reference = tiktoken.Encoding(
        "deepseek_v3",
        pat_str=moonlight_files.PUBLISHED_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=specials,
    )
    return folder, reference


def _random_texts(count: int) -> list[str]:
    """Characters of the sample texts and of all of Unicode, in random order."""
    rng = random.Random(0)
    known = "".join(moonlight_files.TEXTS)
    texts = []
    for _ in range(count):
        text = "".join(
            rng.choice(known) if rng.random() < 0.8 else chr(rng.randrange(0x20, 0x2FFFF))
            for _ in range(rng.randrange(1, 60))
        )
        texts.append(text.encode("utf-8", "ignore").decode())
    return texts


def test_the_pattern_is_the_published_one():
    assert PATTERN == moonlight_files.PUBLISHED_PATTERN


def test_ids_and_text_equal_tiktoken(published):
    folder, reference = published
    tokenizer = load_tokenizer(folder)
    for text in moonlight_files.TEXTS + _random_texts(400):
        ids = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids) == text


def test_every_id_has_its_name_and_the_chat_template_uses_them(published):
    folder, reference = published
    tokenizer = load_tokenizer(folder)
    base = reference.n_vocab - 256
    assert len(tokenizer) == reference.n_vocab
    for offset in range(256):
        name = moonlight_files.NAMED.get(offset, f"<|reserved_token_{base + offset}|>")
        assert tokenizer.convert_tokens_to_ids(name) == base + offset
        assert tokenizer.encode(f"a{name}b")[1] == base + offset
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert special == ("[BOS]", "[EOS]", "[UNK]", "[PAD]")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    ids = tokenizer.encode(chat)
    assert ids == reference.encode(chat, allowed_special="all")
    assert "<|im_user|>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_saved_and_loaded_again_it_is_the_same(published, tmp_path):
    folder, _ = published
    tokenizer = load_tokenizer(folder)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in moonlight_files.TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    assert again.get_chat_template() == tokenizer.get_chat_template()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:500], "not-base64! 500\n"], "line 501"),
        (lambda lines: lines[:100], "100 ranks"),
        (lambda lines: lines[:300] + lines[301:], "which must be 0 to"),
        (lambda lines: lines[:600], "copy both files from the same checkpoint"),
    ],
)
def test_damaged_ranks_are_named(tmp_path, damage, message):
    moonlight_files.write(tmp_path)
    file = tmp_path / "tiktoken.model"
    file.write_text("".join(damage(file.read_text().splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match=message):
        load_tiktoken(tmp_path)


def test_settings_are_needed_and_read(tmp_path):
    moonlight_files.write(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_tokenizer(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is missing"):
        load_tokenizer(tmp_path)
    template = settings.pop("chat_template")
    file.write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert load_tokenizer(tmp_path).get_chat_template() == template
