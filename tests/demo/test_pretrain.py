"""Pretraining on a tiny scale: it learns, repeats, is cached, and leaves nothing half made."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_finetune.demo import pretrain as module
from moe_finetune.demo.batches import IGNORED, Mixture, batches
from moe_finetune.demo.corpus import Document
from moe_finetune.demo.pretrain import (
    PretrainConfig,
    ensure_demo_checkpoint,
    fingerprint,
    learning_rate,
    losses,
    make_model,
    make_tokenizer,
)

CONFIG = PretrainConfig(
    vocab_size=320,
    hidden_size=64,
    layers=2,
    experts=6,
    top_k=3,
    expert_width=32,
    steps=12,
    warmup_steps=4,
    mixture=Mixture(code_rows=2, prose_rows=1, arithmetic_rows=3, length=48),
)
SOURCE = "def area(width, height):\n    return width * height\n" * 40
PROSE = "The area of a field is its width times its height, in square metres.\n" * 40


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    """Two documents of each domain in the place of the standard library's hundreds."""
    documents = [
        Document(f"{domain}{split}", domain, split, text)
        for domain, text in (("code", SOURCE), ("prose", PROSE))
        for split in ("pretrain", "heldout")
    ]
    monkeypatch.setattr(module, "read_corpus", lambda: documents)
    monkeypatch.setattr(module, "PROBLEMS_FOR_TOKENIZER", 50)
    return documents


@pytest.fixture
def seen():
    return []


@pytest.fixture
def checkpoint(tmp_path, seen):
    return ensure_demo_checkpoint(
        tmp_path / "cache",
        5,
        lambda step, steps, values: seen.append((step, steps, values)),
        CONFIG,
    )


def test_the_loss_falls_and_progress_is_told(checkpoint, seen):
    assert [step for step, _, _ in seen] == list(range(1, 13))
    assert {steps for _, steps, _ in seen} == {12}
    for name in ("text", "answers"):
        assert seen[-1][2][name] < 0.9 * seen[0][2][name]


def test_the_checkpoint_is_an_ordinary_one(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.model_type == "qwen3_moe"
    assert model.config.max_position_embeddings >= 2048
    assert model.config.head_dim == 32
    assert len(tokenizer) == model.config.vocab_size == 320
    assert tokenizer.chat_template and model.generation_config.eos_token_id == [0, 2]
    logits = model(**tokenizer("What is 4 plus 8?", return_tensors="pt")).logits
    assert logits.shape[-1] == 320 and logits.std() > 0


def test_a_second_call_takes_the_cache_and_a_changed_setting_does_not(checkpoint, tmp_path):
    def never(*_):
        raise AssertionError("trained again")

    cache = tmp_path / "cache"
    assert ensure_demo_checkpoint(cache, 5, never, CONFIG) == checkpoint
    assert [path.name for path in cache.iterdir()] == [checkpoint.name]
    keys = {
        fingerprint(CONFIG, 5),
        fingerprint(CONFIG, 6),
        fingerprint(dataclasses.replace(CONFIG, steps=13), 5),
        fingerprint(dataclasses.replace(CONFIG, mixture=Mixture(small=0.9)), 5),
    }
    assert len(keys) == 4


def test_the_same_seed_gives_the_same_weights(checkpoint, tmp_path):
    again = ensure_demo_checkpoint(tmp_path / "other", 5, lambda *_: None, CONFIG)
    other = ensure_demo_checkpoint(tmp_path / "other", 6, lambda *_: None, CONFIG)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (checkpoint / name).read_bytes()
    assert (other / name).read_bytes() != (checkpoint / name).read_bytes()


def test_an_interrupted_run_leaves_no_checkpoint_behind(tmp_path):
    def interrupt(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_checkpoint(tmp_path, 5, interrupt, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_FINETUNE_CACHE", str(tmp_path / "named"))
    assert module.default_cache() == tmp_path / "named"
    monkeypatch.delenv("MOE_FINETUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.default_cache() == tmp_path / "xdg" / "moe-finetune"


def test_batches_teach_answers_alone_and_text_in_full(small_corpus):
    tokenizer = make_tokenizer(small_corpus, 320, 5)
    ids_BS, labels_BS = next(batches(small_corpus, tokenizer, CONFIG.mixture, 5))
    assert ids_BS.shape == labels_BS.shape == (6, 48)
    assert torch.equal(ids_BS[:3], labels_BS[:3])
    learned = zip(ids_BS[3:].flatten().tolist(), labels_BS[3:].flatten().tolist(), strict=True)
    text = ""
    for token, label in learned:
        assert label in (token, IGNORED)
        piece = tokenizer.decode([token])
        text += piece if label == IGNORED else f"[{piece}]"
    assert "=[ ][" in text or "Answer:[ ][" in text
    for answer in text.replace("][", "").split("[")[1:-1]:
        body, _, _ = answer.partition("]")
        assert body.removesuffix("<|endoftext|>").strip().isdigit()


def test_losses_are_means_over_learned_tokens(small_corpus):
    tokenizer = make_tokenizer(small_corpus, 320, 5)
    model = make_model(CONFIG, tokenizer, 5)
    ids_BS, labels_BS = next(batches(small_corpus, tokenizer, CONFIG.mixture, 5))
    text, answers = losses(model, ids_BS, labels_BS, text_rows=3)
    log_probs = model(input_ids=ids_BS).logits.log_softmax(-1)
    for value, rows in ((text, range(3)), (answers, range(3, 6))):
        terms = [
            -log_probs[b, s - 1, labels_BS[b, s]]
            for b in rows
            for s in range(1, 48)
            if labels_BS[b, s] != IGNORED
        ]
        torch.testing.assert_close(value, torch.stack(terms).mean())


def test_learning_rate_warms_up_and_comes_down():
    config = PretrainConfig(steps=100, warmup_steps=10, learning_rate=0.2, final_learning_rate=0.01)
    assert learning_rate(config, 0) == pytest.approx(0.02)
    assert learning_rate(config, 9) == learning_rate(config, 10) == pytest.approx(0.2)
    assert learning_rate(config, 55) == pytest.approx(0.105)
    assert learning_rate(config, 100) == pytest.approx(0.01)
