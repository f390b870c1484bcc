"""The demo's checkpoint: a small Qwen3-MoE, pretrained on first use and kept in a cache.

The cache is ``$MOE_FINETUNE_CACHE`` or ``~/.cache/moe-finetune``. A checkpoint's folder is named
after a hash of everything that determines it: configuration, seed, the standard library's text,
the demo's code and the versions of torch, transformers and tokenizers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.demo.batches import IGNORED, Mixture, base_problem, batches
from moe_finetune.demo.corpus import Document, library_folder, read_corpus, source_files
from moe_finetune.demo.data import task_problem
from moe_finetune.io import output_folder, output_lock, sync
from moe_finetune.io.cache_folder import cache_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

Progress = Callable[[int, int, dict[str, float]], None]
"""Called after each step with the steps done, all steps, and values to show."""

OWN_CODE = ("arithmetic", "batches", "corpus", "data", "muon", "pretrain", "tokenizer")
"""Modules of this package that decide what the checkpoint becomes."""

PROBLEMS_FOR_TOKENIZER = 4000
CHARACTERS_FOR_TOKENIZER = 8000
"""Of each document; more makes the tokenizer no better and takes longer."""


@dataclass(frozen=True)
class PretrainConfig:
    """How the checkpoint is made. Every field is part of the cache's key.

    Muon's weight decay keeps singular values below ``1 / weight_decay``. At 0.1 expert outputs
    grew so large that an orthogonality loss of the usual weight was many times the main loss.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    layers: int = 4
    experts: int = 16
    top_k: int = 4
    expert_width: int = 64
    steps: int = 450
    warmup_steps: int = 40
    learning_rate: float = 3e-3
    matrix_learning_rate: float = 3e-2
    final_share: float = 0.03
    weight_decay: float = 2.0
    gradient_norm: float = 1.0
    balance_weight: float = 1e-2
    answer_weight: float = 0.5
    mixture: Mixture = field(default_factory=Mixture)


def ensure_demo_checkpoint(
    cache: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    config: PretrainConfig | None = None,
) -> Path:
    """Return the folder of the pretrained checkpoint, making it when the cache has none.

    Args:
        cache: folder of cached checkpoints; see the module's text for the default.
        seed: of weights and data.
        progress: called after each step; a progress bar when None.
        config: sizes and schedule.

    Raises:
        DataError: this Python has no standard-library source.
    """
    config = config or PretrainConfig()
    root = Path(cache) if cache is not None else cache_folder()
    final = root / f"demo-{fingerprint(config, seed)[:16]}"
    if final.is_dir():
        return final
    with output_lock(final, wait=True):
        if not final.is_dir():  # else another process has made it meanwhile
            with output_folder(final, 0) as partial:
                pretrain(partial, config, seed, progress)
                for path in partial.rglob("*"):
                    sync(path)
    return final


def fingerprint(config: PretrainConfig, seed: int) -> str:
    """Hash of everything that determines the checkpoint."""
    import tokenizers
    import torch
    import transformers

    versions = [m.__version__ for m in (torch, transformers, tokenizers)]
    digest = hashlib.sha256()
    facts = [dataclasses.asdict(config), seed, platform.python_version(), *versions]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    code_files = [Path(__file__).with_name(f"{name}.py") for name in OWN_CODE]
    for path in (*code_files, *source_files(library_folder())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pretrain(
    folder: Path, config: PretrainConfig, seed: int, progress: Progress | None = None
) -> None:
    """Train from random weights and write checkpoint and tokenizer into ``folder``.

    1. learn the tokenizer from the pretraining split;
    2. Muon for matrices and AdamW for the rest, cosine schedule; loss = mean over text tokens and
       mean over answer tokens, weighted, and the balance loss of every layer, injected as in
       fine-tuning;
    3. save.
    """
    import torch

    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import model_facts

    documents = read_corpus()
    tokenizer = make_tokenizer(documents, config.vocab_size, seed)
    model = make_model(config, tokenizer, seed)
    balance = {"weight": config.balance_weight, "layers_reduction": "sum"}
    objective = Objective.from_options({"load_balance": balance}, model_facts(model))
    optimizers = make_optimizers(model, config)
    source = batches(documents, tokenizer, config.mixture, seed)
    text_rows = config.mixture.code_rows + config.mixture.prose_rows
    model.train()
    with _Bar(config.steps, progress) as show, Recorder(model, objective):
        for step in range(config.steps):
            share = schedule(config, step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * share
            text, answers = losses(model, *next(source), text_rows)
            weight = config.answer_weight
            ((1 - weight) * text + weight * answers).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            show(step + 1, {"text": text.item(), "answers": answers.item()})
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(
    documents: list[Document], vocab_size: int, seed: int
) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the pretraining split and problems in all wordings."""
    from moe_finetune.demo.tokenizer import train_tokenizer

    rng = random.Random(seed)
    texts = [d.text[:CHARACTERS_FOR_TOKENIZER] for d in documents if d.split == "pretrain"]
    for draw in (base_problem, task_problem):
        texts += [draw(rng, held_out=False).prompt for _ in range(PROBLEMS_FOR_TOKENIZER)]
    return train_tokenizer(texts, vocab_size)


def make_model(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with random weights; heads of 32, which vLLM's CPU kernels have."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sizes = Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.hidden_size // 32,
        num_key_value_heads=config.hidden_size // 64,
        head_dim=32,  # type: ignore[call-arg]
        intermediate_size=2 * config.hidden_size,
        moe_intermediate_size=config.expert_width,
        num_experts=config.experts,
        num_experts_per_tok=config.top_k,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = Qwen3MoeForCausalLM(sizes)
    finally:
        torch.set_rng_state(rng_state)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, turn_end],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


def losses(
    model: Qwen3MoeForCausalLM,
    ids_BS: Tensor,
    labels_BS: Tensor,
    positions_BS: Tensor,
    text_rows: int,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy (nats per token) of the first ``text_rows`` rows, and of the others.

    The head runs on learned tokens only.
    """
    from torch.nn.functional import cross_entropy

    output = model.model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)
    hidden_BSH = output.last_hidden_state
    means = []
    for rows in (slice(None, text_rows), slice(text_rows, None)):
        targets = labels_BS[rows, 1:].reshape(-1)
        learned = (targets != IGNORED).nonzero().squeeze(1)
        states = hidden_BSH[rows, :-1].flatten(0, 1).index_select(0, learned)
        means.append(cross_entropy(model.lm_head(states), targets.index_select(0, learned)))
    return means[0], means[1]


def make_optimizers(
    model: Qwen3MoeForCausalLM, config: PretrainConfig
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of attention and experts, AdamW for embeddings, routers and norms."""
    import torch

    from moe_finetune.demo.muon import Muon

    other_parts = ("embed_tokens", "lm_head", "mlp.gate.weight")
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or any(part in name for part in other_parts)
        (others if plain else matrices).append(parameter)
    optimizers = (
        Muon(matrices, lr=config.matrix_learning_rate, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def schedule(config: PretrainConfig, step: int) -> float:
    """Share of the learning rate at ``step`` (from 0): linear warm-up, then cosine."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))


class _Bar:
    """A progress bar, or the caller's function instead."""

    def __init__(self, steps: int, progress: Progress | None):
        self.steps, self.progress = steps, progress
        self.bar: Any = None

    def __enter__(self) -> Callable[[int, dict[str, float]], None]:
        if self.progress is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.steps, desc="Pretraining the demo's checkpoint")
        return self._show

    def _show(self, step: int, values: dict[str, float]) -> None:
        if self.progress is not None:
            self.progress(step, self.steps, values)
            return
        self.bar.set_postfix({k: f"{v:.2f}" for k, v in values.items()}, refresh=False)
        self.bar.update(1)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
