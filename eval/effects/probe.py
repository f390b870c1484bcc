"""Measure a model's routing and experts on held-out examples.

Shape legend: T tokens, L MoE layers, E experts, K selected, H hidden, B rows, S positions.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moe_finetune.data.padding import fill, mask, pad
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics import (
    conditional_mean_rank,
    coupling_mass,
    erc_table,
    expert_load,
    expert_overlap,
    gram_cosine,
    max_violation,
    noise_level,
    router_cosine,
    routing_entropy,
    score_variance,
    silhouette,
    top_choice,
)
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.perturbation import Perturbation

IGNORED = -100
TOKENS_AT_ONCE = 6000


class _Layer:
    """One layer's tensors over all forwards, on the host."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}
        self.router_EH = np.empty(0)
        self.gate_EDH = np.empty(0)

    def add(self, record: RoutingRecord) -> None:
        tensors = {
            "index": record.index_TK,
            "scores": record.scores_TE,
            "probabilities": record.distribution_TE,
            "logits": record.logits_TE,
            "inputs": record.inputs_TH,
            "activations": record.activations_gram_TKK,
            "outputs": record.outputs_gram_TKK,
            "ids": record.token_ids_T,
        }
        for name, tensor in tensors.items():
            assert tensor is not None
            self.parts.setdefault(name, []).append(tensor[record.mask_T].cpu().numpy())
        if not len(self.router_EH):
            assert record.expert_factors is not None
            gate = record.expert_factors("gate")
            weight = gate.weight_EOI
            if gate.a_ErI is not None and gate.b_EOr is not None:
                weight = weight + gate.scaling * gate.b_EOr @ gate.a_ErI
            self.router_EH = record.router_weight_EH.float().cpu().numpy()
            self.gate_EDH = weight.float().cpu().numpy()

    def __getitem__(self, name: str) -> np.ndarray:
        return np.concatenate(self.parts[name])


def measure(
    model: nn.Module,
    rows: Sequence[Mapping[str, Sequence[int]]],
    frequencies_VE: np.ndarray,
    *,
    embeddings: int = 1500,
    perturbation: Perturbation | None = None,
) -> tuple[dict[str, float], np.ndarray]:
    """Metrics over ``rows`` (``input_ids``, ``labels``), means over layers, and top-1 experts.

    The model's mode does not change. No recorder may be installed on the model.

    Args:
        model: a supported causal language model, with or without an adapter.
        rows: held-out examples.
        frequencies_VE: frequency of each token in each expert's data, for the conditional mean
            rank.
        embeddings: number of tokens for expert overlap.
        perturbation: a change to routing that is part of the model, such as a loss-free bias.

    Returns:
        Metrics by name (``validation_loss`` in nats per learned token) and ``top1_TL``, the
        selected expert of largest weight of every token.
    """
    layers: dict[int, _Layer] = {}

    def observe(record: RoutingRecord, _: LayerLoss) -> None:
        layers.setdefault(record.layer, _Layer()).add(record)

    total, learned = 0.0, 0
    needs = frozenset({"activations_gram", "outputs_gram", "expert_factors"})
    recorder = Recorder(
        model, observers=[observe], needs=needs, observe="all", perturbation=perturbation
    )
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), recorder:
            for batch in padded_batches(rows):
                labels_BS = batch.pop("labels")
                logits_BSV = model(**batch, use_cache=False).logits[:, :-1]
                targets_BS = labels_BS[:, 1:]
                total += float(
                    cross_entropy(
                        logits_BSV.flatten(0, 1).float(),
                        targets_BS.flatten(),
                        ignore_index=IGNORED,
                        reduction="sum",
                    )
                )
                learned += int((targets_BS != IGNORED).sum())
    finally:
        model.train(was_training)
    ordered = [layers[layer] for layer in sorted(layers)]
    metrics = _summary(ordered, frequencies_VE, embeddings)
    metrics["validation_loss"] = total / learned
    return metrics, np.stack([_top_T(layer) for layer in ordered], axis=1)


def _top_T(layer: _Layer) -> np.ndarray:
    """The selected expert with the largest weight, for each token."""
    index_TK = layer["index"]
    return top_choice(index_TK, np.take_along_axis(layer["scores"], index_TK, axis=1))


def _drawn(tokens: int, count: int) -> np.ndarray:
    """Indices of ``count`` of ``tokens`` tokens, or of all if there are fewer; always the same."""
    count = min(count, tokens)
    return np.sort(np.random.default_rng(0).choice(tokens, count, replace=False))


def _summary(
    layers: Sequence[_Layer], frequencies_VE: np.ndarray, embeddings: int
) -> dict[str, float]:
    seen: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(float(value))

    for index, layer in enumerate(layers):
        probs_TE, index_TK = layer["probabilities"], layer["index"]
        experts = probs_TE.shape[1]
        note("max_violation", max_violation(expert_load(index_TK, experts)))
        note("score_variance", score_variance(layer["scores"]))
        note("entropy", routing_entropy(probs_TE))
        note("activation_cosine", gram_cosine(layer["activations"]))
        note("output_cosine", gram_cosine(layer["outputs"]))
        labels_T = _top_T(layer)
        chosen = _drawn(len(labels_T), embeddings)
        note("expert_overlap", expert_overlap(layer["inputs"][chosen], labels_T[chosen]))
        note("silhouette", silhouette(layer["inputs"][chosen], labels_T[chosen]))
        table = erc_table(layer.router_EH, layer.gate_EDH, alphas=(1,))
        note("erc_loss", table["loss"][1.0])
        note("erc_least_alpha", table["least_alpha"])
        note("noise_level", noise_level(layer.router_EH))
        note("router_cosine", router_cosine(layer.router_EH))
        rank, _ = conditional_mean_rank(layer["logits"], layer["ids"], frequencies_VE)
        note("conditional_mean_rank", rank)
        if index:
            previous = layers[index - 1]
            top_k = index_TK.shape[1]
            mass = coupling_mass(previous["probabilities"], previous["index"], probs_TE, top_k)
            note("coupling_mass", mass)
    return {name: float(np.mean(values)) for name, values in seen.items()}


def padded_batches(
    rows: Sequence[Mapping[str, Sequence[int]]], limit: int = TOKENS_AT_ONCE
) -> Iterator[dict[str, Tensor]]:
    """``input_ids``, ``attention_mask`` and ``labels``, ``(B, S)``, in the order of ``rows``.

    A batch has at most ``limit`` positions, padding included, or one row. Padding is masked.
    """
    for batch in fill(rows, limit, lambda row: len(row["input_ids"])):
        ids = [row["input_ids"] for row in batch]
        labels_BS = pad([row["labels"] for row in batch], IGNORED)
        yield {"input_ids": pad(ids), "attention_mask": mask(ids), "labels": labels_BS}
