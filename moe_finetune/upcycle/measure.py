"""Measurements of one model: perplexity, routing by token, selections by category.

Shape legend: T tokens, L MoE layers, N experts, K selected, C categories, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from moe_finetune.metrics import conditional_mean_rank
from moe_finetune.routing.snapshot_file import routing_path, snapshot
from moe_finetune.routing.sums import CHOICES, VALUES, Sums
from moe_finetune.upcycle.texts import SPLITS, Split

if TYPE_CHECKING:
    from moe_finetune.upcycle.frequencies import FrequencyTable
    from moe_finetune.upcycle.schema import UpcycleRecipe
    from moe_finetune.upcycle.texts import Texts


@dataclass
class Pool:
    """Running mean and population standard deviation of batched values."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, count: int, mean: float, std: float = 0.0) -> None:
        self.count += count
        self.total += count * mean
        self.squares += count * (std * std + mean * mean)

    def summary(self) -> dict[str, float]:
        mean = self.total / self.count if self.count else math.nan
        variance = self.squares / self.count - mean * mean if self.count else math.nan
        return {"mean": mean, "std": math.sqrt(max(variance, 0.0)), "count": self.count}


class RoutingPool:
    """Routing of one split: CMR_1, CMR_2, S_RL, and selections by category.

    CMR_k as in :func:`moe_finetune.metrics.conditional_mean_rank`, pooled over tokens and layers.
    ``s_rl`` is the mean entropy of the router's full probabilities, ``score_entropy`` that of the
    top-k scores; both in nats.
    """

    def __init__(self, categories: int, layers: Sequence[int], experts: int):
        self.pools = {name: Pool() for name in ("cmr_1", "cmr_2", "s_rl", "score_entropy")}
        self.sums = Sums(layers, experts, CHOICES, categories)

    def add(self, record: Any, category_T: np.ndarray, counts_VN: np.ndarray) -> None:
        """Add one layer's record; ``category_T`` belongs to the tokens that the mask keeps."""
        keep = record.mask_T
        logits_TN = record.logits_TE[keep].float().cpu().numpy()
        counts_TN = counts_VN[record.token_ids_T[keep].cpu().numpy()]
        tokens, counted = len(counts_TN), int(counts_TN.any(-1).sum())
        for rank in (1, 2) if counted else ():
            ranks = conditional_mean_rank(logits_TN, np.arange(tokens), counts_TN, rank)
            self.pools[f"cmr_{rank}"].add(counted, *ranks)
        for name, column in (("s_rl", "entropy"), ("score_entropy", "score_entropy")):
            nats_T = VALUES[column](record)[keep].cpu().numpy()
            self.pools[name].add(tokens, float(nats_T.mean()), float(nats_T.std()))
        at_T = keep.nonzero().squeeze(1)
        self.sums.add(record, torch.from_numpy(category_T).to(at_T.device), at_T)

    def summary(self) -> dict[str, Any]:
        """Plain values; selections are counts, ``[category][layer][expert]``."""
        selected_CLN = self.sums.column(self.sums.array(), "load").astype(int)
        selected = {"selected": selected_CLN.tolist()}
        return {name: pool.summary() for name, pool in self.pools.items()} | selected


def measure(
    folder: Path, texts: Texts, table: FrequencyTable, recipe: UpcycleRecipe, *, moe: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measure the model in ``folder``; return the values and a MoE's routing snapshot on test.

    Perplexity of a text is ``exp`` of its mean loss per token, over its first
    ``texts.max_length`` tokens.
    """
    from moe_finetune.checkpoint.load_model import load_model
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.upcycle.dense_parents import load_dense

    model: Any = (load_model if moe else load_dense)(folder, dtype=recipe.dense.dtype)
    model.eval().to(accelerator())
    measured: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    measured["splits"] = {
        split: _of_split(model, texts, table, recipe, split, moe) for split in SPLITS
    }
    if not moe:
        return measured, None
    selected_CLN = np.array(measured["splits"]["test"]["routing"]["selected"])
    top_k, layers = int(model.config.num_experts_per_tok), model_facts(model).moe_layers
    load_LN = selected_CLN.sum(0)
    tokens = int(load_LN[0].sum()) // top_k
    return measured, snapshot(
        routing_path(layers, load_LN, tokens, top_k),
        {},
        domains=dict(zip(texts.categories, selected_CLN, strict=True)),
    )


def accelerator() -> str:
    """The device that models are measured on: the GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _of_split(
    model: nn.Module,
    texts: Texts,
    table: FrequencyTable,
    recipe: UpcycleRecipe,
    split: Split,
    moe: bool,
) -> dict[str, Any]:
    from moe_finetune.data.batches import fill
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.moe.recorder.observe import observed

    length, section = recipe.texts.max_length, recipe.evaluation
    categories = range(len(texts.categories))
    numbers_T = np.concatenate(
        [texts.measurable(split, category, section.texts) for category in categories]
    )
    lengths_T = np.minimum(texts.lengths_T, length)
    # Texts are read batch by batch, because their ids may exceed the memory.
    ordered = numbers_T[np.argsort(lengths_T[numbers_T], kind="stable")].tolist()
    records: list[Any] = []
    pool: RoutingPool | None = None
    recorder: AbstractContextManager[Any] = nullcontext()
    if moe:
        facts = model_facts(model)
        pool = RoutingPool(len(texts.categories), facts.moe_layers, facts.num_experts)
        recorder = observed(model, lambda record, _: records.append(record))
    losses: list[tuple[int, float, int]] = []
    with torch.no_grad(), recorder:
        for batch in fill(ordered, section.tokens_per_batch, lambda text: lengths_T[text]):
            records.clear()
            loss_B = text_losses(model, list(texts.ids(batch, length)))
            category_B, length_B = texts.category_T[batch], lengths_T[batch]
            losses += zip(category_B.tolist(), loss_B, length_B.tolist(), strict=True)
            if pool is not None:
                category_T = np.repeat(category_B, length_B)
                for record in records:
                    pool.add(record, category_T, table.counts_VN)
    categories_T, loss_T, tokens_T = zip(*losses, strict=True)
    perplexities = np.exp(loss_T)
    measured: dict[str, Any] = {
        "perplexity": {
            "mean": float(perplexities.mean()),
            "std": float(perplexities.std()),
            "count": len(losses),
            "of_all_tokens": float(np.exp(np.average(loss_T, weights=np.array(tokens_T) - 1))),
        },
        "losses": [round(loss, 6) for loss in loss_T],
        "categories": list(categories_T),
    }
    return measured | ({"routing": pool.summary()} if pool is not None else {})


def text_losses(model: nn.Module, texts: Sequence[np.ndarray]) -> list[float]:
    """Mean loss per predicted token of each text, in nats, computed in float32."""
    from moe_finetune.data.batches import mask, pad

    device = next(model.parameters()).device
    ids_BS, mask_BS = pad(texts).to(device), mask(texts).to(device)
    logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).logits
    losses_BS = torch.nn.functional.cross_entropy(
        logits_BSV[:, :-1].float().transpose(1, 2), ids_BS[:, 1:], reduction="none"
    )
    learned_BS = mask_BS[:, 1:]
    return ((losses_BS * learned_BS).sum(1) / learned_BS.sum(1)).tolist()
