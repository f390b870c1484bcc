"""Pretraining on a tiny scale: it learns, repeats, and writes an ordinary checkpoint."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.demo import pretrain as module
from eval.demo.batches import IGNORED, Mixture, batches, positions_of
from eval.demo.muon import Muon
from eval.demo.pretrain import (
    Pretraining,
    losses,
    make_model,
    make_optimizers,
    make_tokenizer,
    pretrain,
    schedule,
)
from eval.demo.text import Document

CONFIG = Pretraining(
    vocab_size=320,
    hidden_size=64,
    layers=2,
    experts=6,
    top_k=3,
    expert_width=32,
    steps=12,
    warmup_steps=4,
    mixture=Mixture(code_rows=2, prose_rows=1, arithmetic_rows=3, length=96),
)
SOURCE = "def area(width, height):\n    return width * height\n" * 40
PROSE = "The area of a field is its width times its height, in square metres.\n" * 40


DOCUMENTS = [
    Document(f"{domain}{split}", domain, split, text)
    for domain, text in (("code", SOURCE), ("prose", PROSE))
    for split in ("pretrain", "heldout")
]


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    monkeypatch.setattr(module, "PROBLEMS_FOR_TOKENIZER", 50)


@pytest.fixture
def seen():
    return []


@pytest.fixture
def checkpoint(tmp_path, seen):
    pretrain(tmp_path / "a", DOCUMENTS, 5, CONFIG, lambda *values: seen.append(values))
    return tmp_path / "a"


def test_the_loss_falls_and_progress_is_told(checkpoint, seen):
    assert [step for step, _, _ in seen] == list(range(1, 13))
    for column in (1, 2):
        assert seen[-1][column] < 0.9 * seen[0][column]


def test_the_checkpoint_is_an_ordinary_one(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.model_type == "qwen3_moe" and model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings >= 2048
    assert model.config.head_dim == 32
    assert len(tokenizer) == model.config.vocab_size == 320
    assert tokenizer.chat_template and model.generation_config.eos_token_id == [0, 2]
    logits = model(**tokenizer("What is 4 plus 8?", return_tensors="pt")).logits
    assert logits.shape[-1] == 320 and logits.std() > 0


def test_the_same_seed_gives_the_same_weights(checkpoint, tmp_path):
    for name, seed in (("again", 5), ("other", 6)):
        pretrain(tmp_path / name, DOCUMENTS, seed, CONFIG)
    weights = {n: (tmp_path / n / "model.safetensors").read_bytes() for n in ("again", "other")}
    ours = (checkpoint / "model.safetensors").read_bytes()
    assert weights["again"] == ours != weights["other"]


def test_batches_teach_answers_alone_and_text_in_full():
    tokenizer = make_tokenizer(DOCUMENTS, 320, 5)
    ids_BS, labels_BS, positions_BS = next(batches(DOCUMENTS, tokenizer, CONFIG.mixture, 5))
    assert ids_BS.shape == labels_BS.shape == positions_BS.shape == (6, 96)
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


def test_positions_start_anew_after_every_end():
    ids = np.array([[7, 0, 8, 9, 0, 0, 6], [0, 5, 5, 5, 5, 5, 5]])
    expected = [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert positions_of(ids, end=0).tolist() == expected


def test_losses_are_means_over_learned_tokens_of_documents_by_themselves():
    tokenizer = make_tokenizer(DOCUMENTS, 320, 5)
    model = make_model(CONFIG, tokenizer, 5)
    ids_BS, labels_BS, positions_BS = next(batches(DOCUMENTS, tokenizer, CONFIG.mixture, 5))
    text, answers = losses(model, ids_BS, labels_BS, positions_BS, text_rows=3)
    for value, rows in ((text, range(3)), (answers, range(3, 6))):
        terms = []
        for b in rows:
            starts = [s for s in range(96) if positions_BS[b, s] == 0] + [96]
            for start, end in itertools.pairwise(starts):
                log_probs = model(input_ids=ids_BS[b : b + 1, start:end]).logits.log_softmax(-1)[0]
                # The head also predicts the first token of the next document, from the end's state.
                terms += [
                    -log_probs[s - 1 - start, labels_BS[b, s]]
                    for s in range(start + 1, min(end + 1, 96))
                    if labels_BS[b, s] != IGNORED
                ]
        torch.testing.assert_close(value, torch.stack(terms).mean(), atol=1e-5, rtol=1e-5)


def test_the_schedule_warms_up_and_comes_down():
    config = Pretraining(steps=100, warmup_steps=10, final_share=0.05)
    assert schedule(config, 0) == pytest.approx(0.1)
    assert schedule(config, 9) == schedule(config, 10) == pytest.approx(1.0)
    assert schedule(config, 55) == pytest.approx(0.525)
    assert schedule(config, 100) == pytest.approx(0.05)


def test_every_parameter_has_one_optimizer():
    model = make_model(CONFIG, make_tokenizer(DOCUMENTS, 320, 5), 5)
    matrices, others = make_optimizers(model, CONFIG)
    counts = [
        sum(p.numel() for g in o.param_groups for p in g["params"]) for o in (matrices, others)
    ]
    experts = 2 * 6 * 3 * 64 * 32
    attention = 2 * (2 * 64 * 64 + 2 * 32 * 64)
    assert counts == [experts + attention, model.num_parameters() - experts - attention]


def test_muon_moves_every_expert_by_an_orthogonal_update():
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 24, 10))
    start = stack.detach().clone()
    gradient = torch.randn_like(stack)
    stack.grad = gradient * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    Muon([stack], lr=0.01, weight_decay=0.5).step()
    update = (start * (1 - 0.01 * 0.5) - stack.detach()) / (0.01 * 2.4**0.5)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5 and values.max() < 1.35
    # Singular vectors are the gradient's: U^T G V stays diagonal and positive.
    for moved, matrix in zip(update, gradient, strict=True):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ moved @ v.T
        off = inside - torch.diag(inside.diagonal())
        assert off.abs().max() < 1e-3 and inside.diagonal().min() > 0.5
