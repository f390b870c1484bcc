"""Measurements of one model: perplexity, routing by token, selections by category.

Shape legend: T tokens, L MoE layers, N experts, K selected, C categories, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.errors import RecipeError
from moe_finetune.metrics import conditional_mean_rank, top_choice
from moe_finetune.metrics.arrays import entropy
from moe_finetune.upcycle.texts import SPLITS, Split

if TYPE_CHECKING:
    from moe_finetune.upcycle.frequencies import FrequencyTable
    from moe_finetune.upcycle.recipe import UpcycleRecipe
    from moe_finetune.upcycle.texts import Texts

PASSAGE = 120
"""Tokens of each passage on the page."""


@dataclass
class Pool:
    """Mean and population standard deviation of values that arrive in batches."""

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

    def __init__(self, categories: int, layers: int, experts: int):
        self.ranks = (Pool(), Pool())
        self.entropy, self.score_entropy = Pool(), Pool()
        self.selected_CLN = np.zeros((categories, layers, experts), np.int64)
        self.first_CLN = np.zeros_like(self.selected_CLN)

    def add(self, layer: int, record: Any, category_T: np.ndarray, counts_VN: np.ndarray) -> None:
        """Add one layer's record; ``category_T`` is of the tokens that the mask keeps."""
        keep = record.mask_T
        logits_TN = record.logits_TE[keep].float().cpu().numpy()
        ids_T = record.token_ids_T[keep].cpu().numpy()
        index_TK = record.index_TK[keep].cpu().numpy()
        tokens = len(ids_T)
        counts_TN = counts_VN[ids_T]
        counted = int((counts_TN.sum(-1) > 0).sum())
        if counted:
            for k, pool in enumerate(self.ranks, start=1):
                rank = conditional_mean_rank(logits_TN, np.arange(tokens), counts_TN, k)
                pool.add(counted, float(rank), rank.std)
        for pool, of in (
            (self.entropy, record.distribution_TE),
            (self.score_entropy, record.scores_TK),
        ):
            nats_T = entropy(of[keep].cpu().numpy())
            pool.add(tokens, float(nats_T.mean()), float(nats_T.std()))
        places_TK = np.broadcast_to(category_T[:, None], index_TK.shape)
        np.add.at(self.selected_CLN[:, layer], (places_TK, index_TK), 1)
        np.add.at(self.first_CLN[:, layer], (category_T, logits_TN.argmax(-1)), 1)

    def summary(self) -> dict[str, Any]:
        """Plain values; selections are counts, ``[category][layer][expert]``."""
        return {
            "cmr_1": self.ranks[0].summary(),
            "cmr_2": self.ranks[1].summary(),
            "s_rl": self.entropy.summary(),
            "score_entropy": self.score_entropy.summary(),
            "selected": self.selected_CLN.tolist(),
            "first": self.first_CLN.tolist(),
        }


def measure(
    folder: Path, texts: Texts, table: FrequencyTable, recipe: UpcycleRecipe, *, moe: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measurements of the model in ``folder``, and a MoE's routing snapshot on test.

    Perplexity of a text is ``exp`` of its mean loss per token, over its first
    ``texts.max_length`` tokens.
    """
    from moe_finetune.checkpoint.loading import load_model
    from moe_finetune.models.loading import load_tokenizer
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.upcycle.dense import load_dense
    from moe_finetune.upcycle.judgement import judge

    section = recipe.evaluation
    model: Any = (load_model if moe else load_dense)(folder, dtype=recipe.dense.dtype)
    model.eval().to(accelerator())
    tokenizer = load_tokenizer(folder)
    measured: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    measured["splits"] = {
        split: _of_split(model, texts, table, recipe, split, moe) for split in SPLITS
    }
    if section.judgement is not None:
        measured["judgement"] = judge(model, tokenizer, texts, section.judgement)
    if not moe:
        return measured, None
    selected_CLN = np.array(measured["splits"]["test"]["routing"]["selected"])
    facts = model_facts(model)
    snapshot = {
        "layers": list(facts.moe_layers),
        "num_experts": facts.num_experts,
        "top_k": int(model.config.num_experts_per_tok),
        "load": selected_CLN.sum(0).tolist(),
        "domains": dict(zip(texts.categories, selected_CLN.tolist(), strict=True)),
        "colored_text": passages(
            model, tokenizer, texts, table.counts_VN, section.passages, section.passage_layer
        ),
    }
    return measured, snapshot


def accelerator() -> str:
    """The device that models are measured on: the GPU if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _of_split(
    model: Any,
    texts: Texts,
    table: FrequencyTable,
    recipe: UpcycleRecipe,
    split: Split,
    moe: bool,
) -> dict[str, Any]:
    import torch

    from moe_finetune.data.padding import fill
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import model_facts

    length, section = recipe.texts.max_length, recipe.evaluation
    categories = range(len(texts.categories))
    numbers_T = np.concatenate([texts.measurable(split, c, section.texts) for c in categories])
    lengths_T = np.minimum(texts.lengths_T, length)
    # Texts are read batch by batch: their ids may be more than the memory.
    ordered = numbers_T[np.argsort(lengths_T[numbers_T], kind="stable")].tolist()
    records: list[Any] = []
    pool: RoutingPool | None = None
    recorder: Recorder | None = None
    if moe:
        facts = model_facts(model)
        pool = RoutingPool(len(texts.categories), len(facts.moe_layers), facts.num_experts)
        observe = [lambda record, _: records.append(record)]
        recorder = Recorder(model, observers=observe, observe="all")
        recorder.install()
    losses: list[tuple[int, float, int]] = []
    try:
        with torch.no_grad():
            for batch in fill(ordered, section.tokens_per_batch, lambda text: lengths_T[text]):
                records.clear()
                loss_B = text_losses(model, list(texts.ids(batch, length)))
                category_B, length_B = texts.category_T[batch], lengths_T[batch]
                losses += zip(category_B.tolist(), loss_B, length_B.tolist(), strict=True)
                if pool is not None:
                    category_T = np.repeat(category_B, length_B)
                    for layer, record in enumerate(records):
                        pool.add(layer, record, category_T, table.counts_VN)
    finally:
        if recorder is not None:
            recorder.restore()
    loss_T = [loss for _, loss, _ in losses]
    perplexities = np.exp(loss_T)
    weights = [tokens - 1 for _, _, tokens in losses]
    measured: dict[str, Any] = {
        "perplexity": {
            "mean": float(perplexities.mean()),
            "std": float(perplexities.std()),
            "count": len(losses),
            "of_all_tokens": float(
                np.exp(np.average([loss for _, loss, _ in losses], weights=weights))
            ),
        },
        "losses": [round(loss, 6) for loss in loss_T],
        "categories": [category for category, _, _ in losses],
    }
    return measured | ({"routing": pool.summary()} if pool is not None else {})


def text_losses(model: Any, texts: Sequence[np.ndarray]) -> list[float]:
    """Mean loss per predicted token of each text, nats, in float32."""
    import torch

    from moe_finetune.data.padding import mask, pad

    device = next(model.parameters()).device
    ids_BS, mask_BS = pad(texts).to(device), mask(texts).to(device)
    logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).logits
    losses_BS = torch.nn.functional.cross_entropy(
        logits_BSV[:, :-1].float().transpose(1, 2), ids_BS[:, 1:], reduction="none"
    )
    learned_BS = mask_BS[:, 1:]
    return ((losses_BS * learned_BS).sum(1) / learned_BS.sum(1)).tolist()


def passages(
    model: Any,
    tokenizer: Any,
    texts: Texts,
    counts_VN: np.ndarray,
    count: int,
    layer: int | None = None,
) -> list[dict[str, Any]]:
    """The beginning of ``count`` test texts of different categories, as the report colors them (P3
    Figure 1): by the expert that weighs most in one layer, by default the middle one.

    The paper shows an excerpt of one text in layer 16. Each passage has ``category``, ``layer``,
    ``tokens`` (their text), ``experts`` and ``frequent``: the expert of the token's largest count,
    -1 where the training texts have none.

    Raises:
        RecipeError: the model has no such MoE layer.
    """
    import torch

    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import model_facts

    layers = model_facts(model).moe_layers
    if layer is not None and layer not in layers:
        raise RecipeError(
            f"evaluation.passage_layer: {layer}; the MoE layers are {layers[0]} to {layers[-1]}"
        )
    chosen_layer = len(layers) // 2 if layer is None else layers.index(layer)
    records: list[Any] = []
    chosen = np.linspace(0, len(texts.categories) - 1, count).round().astype(int)
    shown_passages = []
    with (
        torch.no_grad(),
        Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"),
    ):
        for category in dict.fromkeys(chosen.tolist()):
            first = texts.measurable("test", category)[:1]
            (ids_T,) = texts.ids(first, PASSAGE)
            records.clear()
            ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None].to(model.device)
            model(input_ids=ids_1T, use_cache=False)
            counts_TN = counts_VN[ids_T]
            frequent_T = np.where(counts_TN.any(1), counts_TN.argmax(1), -1)
            shown_passages.append(
                {
                    "category": texts.categories[category],
                    "layer": layers[chosen_layer],
                    "tokens": [tokenizer.decode([int(i)]) for i in ids_T],
                    "experts": top_choice(
                        records[chosen_layer].index_TK.cpu().numpy(),
                        records[chosen_layer].scores_TK.cpu().numpy(),
                    ).tolist(),
                    "frequent": frequent_T.tolist(),
                }
            )
    return shown_passages
