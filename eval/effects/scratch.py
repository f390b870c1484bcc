"""One arm and seed of pretraining from random weights: does a method disturb it? (P1 Table 19)"""

import dataclasses
import math
from functools import cache
from typing import Any

import torch

from eval.demo.batches import Mixture, batches
from eval.demo.pretrain import Pretraining, losses, make_model, make_tokenizer
from eval.demo.text import Document, read_documents
from eval.effects.settings import ScratchSection
from moe_finetune.training.specialization import Specialization

HELD_OUT_SEED = 10_007
HELD_OUT_BATCHES = 4
KEPT = 8
"""One document in this many is kept, because every run tokenizes them again."""


@cache
def _corpus() -> tuple[list[Document], Any]:
    """Part of the demo's documents, more than these short runs read, and a tokenizer."""
    documents = read_documents()[::KEPT]
    return documents, make_tokenizer(documents, Pretraining().vocab_size, seed=0)


def run_scratch(section: ScratchSection, method: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one arm and return its curves; arms of one seed share weights and batches.

    Keys: ``loss`` and ``gradient_norm`` (before clipping) of every step, ``terms`` and routing
    values over training, ``held_out`` (mean loss in nats on held-out documents; infinite when
    training diverged) and ``diverged``: the step at which a number was no longer finite, or None.
    """
    documents, tokenizer = _corpus()
    mixture = dataclasses.replace(Mixture(), **section.mixture)  # type: ignore[arg-type]
    config = dataclasses.replace(
        Pretraining(),
        **section.model,  # type: ignore[arg-type]
        mixture=mixture,
    )
    model = make_model(config, tokenizer, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.learning_rate, betas=(0.9, 0.98), weight_decay=0.1
    )
    text_rows = mixture.code_rows + mixture.prose_rows
    source = batches(documents, tokenizer, mixture, seed)
    curve, norms, diverged = [], [], None
    torch.manual_seed(seed)
    model.train()
    with Specialization(model, method, total_steps=section.steps) as specialization:
        for step in range(section.steps):
            for group in optimizer.param_groups:
                group["lr"] = section.learning_rate * schedule(step, section.steps)
            text, answers = losses(model, *next(source), text_rows)
            loss = (text + answers) / 2
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.gradient_norm)
            curve.append(loss.item())
            norms.append(norm.item())
            if not (math.isfinite(curve[-1]) and math.isfinite(norms[-1])):
                diverged = step
                break
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            specialization.step()
        values = specialization.read()
    held_out = math.inf
    if diverged is None:
        held_out = _held_out(model, documents, tokenizer, mixture, text_rows)
    return {
        "loss": curve,
        "gradient_norm": norms,
        "values": values,
        "held_out": held_out,
        "diverged": diverged,
    }


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: linear over the first tenth, then a cosine to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def _held_out(
    model: Any, documents: list[Document], tokenizer: Any, mixture: Mixture, text_rows: int
) -> float:
    """Mean of text and answer loss on documents of no training split."""
    hidden = [
        dataclasses.replace(document, split="pretrain")  # the split that `batches` reads
        for document in documents
        if document.split == "heldout"
    ]
    source = batches(hidden, tokenizer, mixture, HELD_OUT_SEED)
    model.eval()
    with torch.no_grad():
        batch_losses = [losses(model, *next(source), text_rows) for _ in range(HELD_OUT_BATCHES)]
    return sum(float(text + answers) / 2 for text, answers in batch_losses) / len(batch_losses)
