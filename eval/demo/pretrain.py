"""The demo's checkpoint: a small Qwen3-MoE (or a twin) from random weights, by Muon and AdamW."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, set_seed

from eval.demo.arithmetic import base_problem, task_problem
from eval.demo.batches import IGNORED, Mixture, batches
from eval.demo.muon import Muon
from eval.demo.text import Document
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import resolve_method
from recipes.upcycle.tokenizer import train_tokenizer

PROBLEMS_FOR_TOKENIZER = 4000
CHARACTERS_FOR_TOKENIZER = 8000
"""Of each document; more makes the tokenizer no better and takes longer."""


@dataclass(frozen=True)
class Pretraining:
    """Sizes and schedule.

    Muon's weight decay keeps singular values below ``1 / weight_decay``. At 0.1 expert outputs
    grew so large that an orthogonality loss of the usual weight was many times the main loss.
    """

    family: str = "qwen3_moe"
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


def pretrain(
    folder: Path,
    documents: Sequence[Document],
    seed: int = 0,
    config: Pretraining | None = None,
    show: Callable[[int, float, float], None] = lambda step, text, answers: None,
) -> None:
    """Learn a tokenizer, train from random weights and write both into ``folder`` in bfloat16.

    The loss is the weighted mean over text tokens and over answer tokens, and the balance loss of
    every layer, injected as in fine-tuning. ``show`` is called after each step.
    """
    config = config or Pretraining()
    tokenizer = make_tokenizer(documents, config.vocab_size, seed)
    model = make_model(config, tokenizer, seed)
    balance = {"weight": config.balance_weight, "layers_reduction": "sum"}
    objective = Objective(
        resolve_method({"terms": {"load_balance": balance}}).terms, model_facts(model)
    )
    optimizers = make_optimizers(model, config)
    source = batches(documents, tokenizer, config.mixture, seed)
    model.train()
    with Recorder(model, objective):
        for step in range(config.steps):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * schedule(config, step)
            text, answers = losses(model, *next(source), config.mixture.text_rows)
            weight = config.answer_weight
            ((1 - weight) * text + weight * answers).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            show(step + 1, text.item(), answers.item())
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(documents: Sequence[Document], vocab_size: int, seed: int) -> Any:
    """Learn the tokenizer from the pretraining split and problems in all wordings."""
    rng = random.Random(seed)
    texts = [d.text[:CHARACTERS_FOR_TOKENIZER] for d in documents if d.split == "pretrain"]
    for draw in (base_problem, task_problem):
        texts += [draw(rng, held_out=False).prompt for _ in range(PROBLEMS_FOR_TOKENIZER)]
    return train_tokenizer(texts, vocab_size)


FAMILIES: Mapping[str, Callable[[Pretraining], dict[str, Any]]] = {
    "qwen3_moe": lambda config: {
        "head_dim": 32,
        "intermediate_size": 2 * config.hidden_size,
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": True,
    },
    "olmoe": lambda config: {"intermediate_size": config.expert_width},
    "deepseek_v2": lambda config: {  # one dense layer, and an expert for every token
        "num_key_value_heads": config.hidden_size // 32,
        "q_lora_rank": None,
        "kv_lora_rank": config.hidden_size // 2,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "intermediate_size": 2 * config.hidden_size,
        "moe_intermediate_size": config.expert_width,
        "n_routed_experts": config.experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
}


def make_model(config: Pretraining, tokenizer: Any, seed: int) -> Any:
    """A model with random weights; heads of 32, which vLLM's CPU kernels have."""
    usual = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.hidden_size // 32,
        "num_key_value_heads": config.hidden_size // 64,
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes = AutoConfig.for_model(config.family, **usual | FAMILIES[config.family](config))
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(sizes)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, turn_end],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


def losses(
    model: Any, ids_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor, text_rows: int
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy (nats per token) of the first ``text_rows`` rows, and of the others.

    The head runs on learned tokens only.
    """
    output = model.model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)
    hidden_BSH = output.last_hidden_state
    means = []
    for rows in (slice(None, text_rows), slice(text_rows, None)):
        targets = labels_BS[rows, 1:].reshape(-1)
        learned = (targets != IGNORED).nonzero().squeeze(1)
        states = hidden_BSH[rows, :-1].flatten(0, 1).index_select(0, learned)
        means.append(cross_entropy(model.lm_head(states), targets.index_select(0, learned)))
    return means[0], means[1]


def make_optimizers(model: Any, config: Pretraining) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of attention and experts, AdamW for embeddings, routers and norms."""
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


def schedule(config: Pretraining, step: int) -> float:
    """Share of the learning rate at ``step`` (from 0): linear warm-up, then cosine."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))
