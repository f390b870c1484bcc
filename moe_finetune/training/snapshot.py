"""Routing of the model on a fixed sample of examples, before and after training.

Written to ``routing/before.json`` and ``routing/after.json``; the report draws them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_finetune.capture.recorder import Perturbation, Recorder, model_facts
from moe_finetune.capture.records import RoutingRecord
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.metrics import (
    conditional_activation,
    expert_overlap,
    gram_cosine,
    max_violation,
    router_cosine,
    routing_entropy,
    routing_variance,
    score_variance,
)
from moe_finetune.training import ranks

MAX_TOKENS = 8192
MAX_EMBEDDINGS = 1500
MAX_POINTS = 450


class _Collector:
    """Observer that keeps what the snapshot needs, on the host."""

    def __init__(self) -> None:
        self.index: dict[int, list[np.ndarray]] = {}
        self.scores: dict[int, list[np.ndarray]] = {}
        self.probabilities: dict[int, list[np.ndarray]] = {}
        self.inputs: dict[int, list[np.ndarray]] = {}
        self.grams: dict[int, dict[str, list[np.ndarray]]] = {}
        self.router: dict[int, np.ndarray] = {}

    def __call__(self, record: RoutingRecord, _: LayerLoss) -> None:
        keep, layer = record.mask_T, record.layer

        def note(store: dict[int, list[np.ndarray]], tensor: torch.Tensor) -> None:
            store.setdefault(layer, []).append(tensor[keep].float().cpu().numpy())

        self.index.setdefault(layer, []).append(record.index_TK[keep].cpu().numpy())
        note(self.scores, record.scores_TE)
        note(self.probabilities, record.distribution_TE)
        note(self.inputs, record.inputs_TH)
        grams = self.grams.setdefault(layer, {"activations": [], "outputs": []})
        assert record.activations_gram_TKK is not None and record.outputs_gram_TKK is not None
        grams["activations"].append(record.activations_gram_TKK[keep].float().cpu().numpy())
        grams["outputs"].append(record.outputs_gram_TKK[keep].float().cpu().numpy())
        self.router[layer] = record.router_weight_EH.float().cpu().numpy()


def take_snapshot(
    model: nn.Module, examples: Any, path: Path, perturbation: Perturbation | None = None
) -> dict[str, Any]:
    """Record the routing of ``examples`` (rows with ``input_ids``) and write it to ``path``.

    The first rows are used, up to 8,192 tokens; the model is left in the mode it was in.
    """
    facts = model_facts(model)
    collector = _Collector()
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    needs = frozenset({"activations_gram", "outputs_gram"})
    try:
        with (
            torch.no_grad(),
            Recorder(
                model,
                observers=[collector],
                needs=needs,
                observe="all",
                perturbation=perturbation,
            ),
        ):
            tokens = 0
            for row in examples:
                ids = torch.tensor([row["input_ids"][: MAX_TOKENS - tokens]], device=device)
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                tokens += ids.shape[1]
                if tokens >= MAX_TOKENS:
                    break
    finally:
        model.train(was_training)
    # Every rank took part, because the model may be sharded; rank 0 writes.
    snapshot = _summarize(collector, list(facts.moe_layers), facts.num_experts, facts.top_k)
    if ranks.rank() > 0:
        return snapshot
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(snapshot), encoding="utf-8")
    partial.replace(path)
    return snapshot


def _summarize(seen: _Collector, layers: list[int], experts: int, top_k: int) -> dict[str, Any]:
    index = {layer: np.concatenate(seen.index[layer]) for layer in layers}
    scores = {layer: np.concatenate(seen.scores[layer]) for layer in layers}
    probabilities = {layer: np.concatenate(seen.probabilities[layer]) for layer in layers}
    inputs = {layer: np.concatenate(seen.inputs[layer]) for layer in layers}
    load = {layer: np.bincount(index[layer].ravel(), minlength=experts) for layer in layers}
    grams = {
        kind: {layer: np.concatenate(seen.grams[layer][kind]) for layer in layers}
        for kind in ("activations", "outputs")
    }

    def overlap(layer: int) -> float:
        rows = slice(0, MAX_EMBEDDINGS)
        return float(expert_overlap(inputs[layer][rows], probabilities[layer][rows].argmax(1)))

    metrics = {
        "max_violation": lambda layer: max_violation(load[layer]),
        "entropy": lambda layer: routing_entropy(probabilities[layer]),
        "score_variance": lambda layer: score_variance(scores[layer]),
        "routing_variance": lambda layer: routing_variance(probabilities[layer]),
        "expert_overlap": overlap,
        "router_cosine": lambda layer: router_cosine(seen.router[layer]),
    }
    if top_k > 1:
        metrics["activation_cosine"] = lambda layer: gram_cosine(grams["activations"][layer])
        metrics["output_cosine"] = lambda layer: gram_cosine(grams["outputs"][layer])
    values = {name: [float(of(layer)) for layer in layers] for name, of in metrics.items()}
    middle = len(layers) // 2
    snapshot: dict[str, Any] = {
        "layers": layers,
        "num_experts": experts,
        "top_k": top_k,
        "tokens": len(index[layers[0]]),
        "load": [load[layer].tolist() for layer in layers],
        "mean_probability": [probabilities[layer].mean(0).round(6).tolist() for layer in layers],
        "metrics": {
            name: {"per_layer": row, "mean": float(np.mean(row))} for name, row in values.items()
        },
        "embeddings": principal_points(
            layers[middle],
            inputs[layers[middle]],
            probabilities[layers[middle]].argmax(1),
            load[layers[middle]],
        ),
    }
    if middle + 1 < len(layers):
        low, high = layers[middle], layers[middle + 1]
        table = conditional_activation(index[low], index[high], experts)
        snapshot["conditional_activation"] = {
            "layers": [low, high],
            "matrix": np.asarray(table).round(4).tolist(),
        }
    return snapshot


def principal_points(
    layer: int, inputs_NH: np.ndarray, top_N: np.ndarray, load_E: np.ndarray
) -> dict[str, Any]:
    """First two principal components of tokens whose top expert is one of the three busiest."""
    busiest = np.argsort(-load_E, kind="stable")[:3]
    chosen = np.flatnonzero(np.isin(top_N, busiest))[:MAX_POINTS]
    if len(chosen) < 3:
        return {"layer": layer, "points": []}
    rows = inputs_NH[chosen].astype(np.float32)
    centered = rows - rows.mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    flat = centered @ axes[:2].T
    points = [
        [round(float(x), 4), round(float(y), 4), int(expert)]
        for (x, y), expert in zip(flat, top_N[chosen], strict=True)
    ]
    return {"layer": layer, "points": points}
