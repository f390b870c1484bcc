"""Pretraining from random weights: does a method disturb it? (P1 Table 19)"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from eval.demo.batches import Mixture, batches
from eval.demo.pretrain import Pretraining, losses, make_model, make_tokenizer
from eval.demo.text import Document, read_documents
from moe_finetune.training.specialization import Specialization

HELD_OUT_SEED = 10_007
HELD_OUT_BATCHES = 4
KEPT = 8
"""One document in this many is kept, because every run tokenizes them again."""


@cache
def _corpus() -> tuple[Sequence[Document], Any]:
    """Part of the demo's documents, more than these short runs read, and a tokenizer."""
    documents = read_documents()[::KEPT]
    return documents, make_tokenizer(documents, Pretraining().vocab_size, seed=0)


def run(settings: dict[str, Any], method: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one arm; arms of one seed share weights and batches.

    Args:
        settings: ``steps``, ``learning_rate`` (AdamW, linear over the first tenth, then a cosine),
            and changes to :class:`Pretraining` (``model``) and :class:`Mixture` (``mixture``).
        method: ``method:`` of a recipe.

    Returns:
        ``loss`` of every step, ``held_out`` (nats; None when training diverged),
        ``largest_gradient`` (norm before clipping, after the first tenth), ``spikes`` (steps whose
        loss is 0.1 nats above the mean of the five before) and ``diverged``, the step or None.
    """
    documents, tokenizer = _corpus()
    steps, rate = settings["steps"], settings["learning_rate"]
    mixture = Mixture(**settings.get("mixture", {}))
    config = Pretraining(**settings.get("model", {}), mixture=mixture)
    model = make_model(config, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    source = batches(documents, tokenizer, mixture, seed)
    curve, norms, diverged = [], [], None
    torch.manual_seed(seed)
    model.train()
    with Specialization(model, method, total_steps=steps) as specialization:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, steps)
            text, answers = losses(model, *next(source), mixture.text_rows)
            loss = (text + answers) / 2
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            curve.append(loss.item())
            norms.append(norm.item())
            if not (math.isfinite(curve[-1]) and math.isfinite(norms[-1])):
                diverged = step
                break
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            specialization.step()
    held_out = None if diverged is not None else _held_out(model, documents, tokenizer, mixture)
    first = max(6, steps // 10)
    return {
        "loss": curve,
        "held_out": held_out,
        "largest_gradient": max(norms[max(1, steps // 10) :], default=None),
        "spikes": sum(curve[i] > sum(curve[i - 5 : i]) / 5 + 0.1 for i in range(first, len(curve))),
        "diverged": diverged,
    }


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: linear over the first tenth, then a cosine to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def _held_out(model: Any, documents: Sequence[Document], tokenizer: Any, mixture: Mixture) -> float:
    """Mean of text and answer loss on documents of no training split."""
    hidden = [
        dataclasses.replace(document, split="pretrain")  # the split that `batches` reads
        for document in documents
        if document.split == "heldout"
    ]
    source = batches(hidden, tokenizer, mixture, HELD_OUT_SEED)
    model.eval()
    with torch.no_grad():
        pairs = [losses(model, *next(source), mixture.text_rows) for _ in range(HELD_OUT_BATCHES)]
    return sum(float(text + answers) / 2 for text, answers in pairs) / len(pairs)
