"""All metrics of one routing trace, in one pass with bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.metrics.arrays import mean_known
from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.experts import NEIGHBORS, separation
from moe_finetune.metrics.paths import pair_counts
from moe_finetune.routing.sums import RoutingSums, gather, routing_metrics

if TYPE_CHECKING:
    from moe_finetune.routing.trace import RoutingTrace, TraceChunk


def summarize_trace(trace: RoutingTrace, sample: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Metrics of a trace per layer and averaged over layers.

    Args:
        sample: number of embeddings per layer for ``expert_overlap`` and ``silhouette``; their cost
            grows with its square.

    Returns a dictionary with

    - ``trace``: what was measured (model type, checkpoint, layers, sizes, domains);
    - ``sample``: ``embeddings`` used per layer (0 without any), ``neighbors`` and ``seed``;
    - ``per_layer``: metric -> list over layers; None where a metric does not exist in a layer;
    - ``mean``: metric -> mean over the layers that have it;
    - ``arrays``: numpy ``load_LE``, ``conditional_activation_LEE`` (between adjacent layers, so one
      entry less than layers), ``domain_shares_GLE``, and ``mean_score_LE`` where weights exist.

    All but ``arrays`` can be written as JSON. Raises TraceError for a domain without tokens.
    """
    info = trace.info
    transitions = _Transitions(len(info.layers), info.num_experts)
    by_domain = gather(
        trace, lambda chunk: chunk["domain"], len(info.domains), "domain", transitions
    )
    _check_domains(trace, by_domain)
    total = by_domain.total()
    per_layer: dict[str, list[float | None]] = {
        name: values.tolist() for name, values in routing_metrics(total).items()
    }
    domains = [domain_information(by_domain.load_LE[:, layer]) for layer in range(len(info.layers))]
    if len(info.domains) > 1:
        per_layer["domain_information"] = [metrics["mutual_information"] for metrics in domains]
    if trace.num_embeddings:
        per_layer |= _embedding_metrics(trace, sample, seed)
    arrays = {
        "load_LE": total.load_LE,
        "conditional_activation_LEE": transitions.conditional(total.load_LE),
        "domain_shares_GLE": np.stack([metrics["shares_GE"] for metrics in domains], axis=1),
    }
    if total.score_LE is not None:
        arrays["mean_score_LE"] = total.score_LE / total.tokens
    return {
        "trace": {
            "path": str(trace.path),
            "model_type": info.model_type,
            "checkpoint": info.checkpoint,
            "layers": list(info.layers),
            "num_experts": info.num_experts,
            "top_k": info.top_k,
            "tokens": info.tokens,
            "domains": {
                name: int(tokens)
                for name, tokens in zip(info.domains, by_domain.tokens, strict=True)
            },
        },
        "sample": {
            "embeddings": min(sample, trace.num_embeddings),
            "neighbors": NEIGHBORS,
            "seed": seed,
        },
        "per_layer": per_layer,
        "mean": {name: mean_known(values) for name, values in per_layer.items()},
        "arrays": arrays,
    }


def _check_domains(trace: RoutingTrace, by_domain: RoutingSums) -> None:
    from moe_finetune.errors import TraceError

    if not by_domain.tokens.all():
        name = trace.info.domains[int(by_domain.tokens.argmin())]
        raise TraceError(f"{trace.path}: domain '{name}' has no tokens; record it again")


class _Transitions:
    """Counts of expert pairs in adjacent MoE layers."""

    def __init__(self, layers: int, experts: int):
        self.counts = np.zeros((layers - 1, experts, experts), np.int64)

    def __call__(self, chunk: TraceChunk) -> None:
        ids, experts = chunk["ids"], self.counts.shape[-1]
        for layer in range(len(self.counts)):
            self.counts[layer] += pair_counts(ids[:, layer], ids[:, layer + 1], experts)

    def conditional(self, load_LE: np.ndarray) -> np.ndarray:
        """``P(n in A^{l+1} given e in A^l)`` of every pair of adjacent layers."""
        used = load_LE[:-1, :, None]
        return np.divide(self.counts, used, out=np.zeros(self.counts.shape), where=used > 0)


def _embedding_metrics(
    trace: RoutingTrace, sample: int, seed: int
) -> dict[str, list[float | None]]:
    embeddings_NLH, labels_NL = _sampled_embeddings(trace, sample, seed)
    metrics = [
        separation(embeddings_NLH[:, layer], labels_NL[:, layer])
        for layer in range(len(trace.info.layers))
    ]
    overlaps, silhouettes = zip(*metrics, strict=True)
    return {"expert_overlap": list(overlaps), "silhouette": list(silhouettes)}


def _sampled_embeddings(
    trace: RoutingTrace, sample: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    total = trace.num_embeddings
    count = min(sample, total)
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    embeddings, labels, start = [], [], 0
    for chunk in trace.chunks("embeddings", "embedding_labels"):
        stop = start + len(chunk["embedding_labels"])
        in_chunk = chosen[(chosen >= start) & (chosen < stop)] - start
        embeddings.append(chunk["embeddings"][in_chunk])
        labels.append(chunk["embedding_labels"][in_chunk])
        start = stop
    return np.concatenate(embeddings), np.concatenate(labels)
