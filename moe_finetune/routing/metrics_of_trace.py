"""All metrics of one routing trace, in one pass with bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.metrics.arrays import mean_known
from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.experts import NEIGHBORS, separation
from moe_finetune.metrics.paths import pair_counts
from moe_finetune.routing.sums_of_trace import gather

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
    sums_GLW = by_domain.array()
    tokens_G = by_domain.column(sums_GLW, "tokens")[:, 0]
    _check_domains(trace, tokens_G)
    total_LW = sums_GLW.sum(0)
    per_layer: dict[str, list[float | None]] = {
        name: values.tolist() for name, values in by_domain.metrics(total_LW).items()
    }
    load_GLE = by_domain.column(sums_GLW, "load")
    load_LE = by_domain.load_LE()
    domains = [domain_information(load_GLE[:, layer]) for layer in range(len(info.layers))]
    if len(info.domains) > 1:
        per_layer["domain_information"] = [metrics["mutual_information"] for metrics in domains]
    if trace.num_embeddings:
        per_layer |= _embedding_metrics(trace, sample, seed)
    arrays = {
        "load_LE": load_LE,
        "conditional_activation_LEE": transitions.conditional(load_LE),
        "domain_shares_GLE": np.stack([metrics["shares_GE"] for metrics in domains], axis=1),
    }
    if "score" in by_domain.columns:
        arrays["mean_score_LE"] = by_domain.column(total_LW, "score") / info.tokens
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
                name: int(tokens) for name, tokens in zip(info.domains, tokens_G, strict=True)
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


def _check_domains(trace: RoutingTrace, tokens_G: np.ndarray) -> None:
    from moe_finetune.errors import TraceError

    if not tokens_G.all():
        name = trace.info.domains[int(tokens_G.argmin())]
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
    embeddings = []
    labels = []
    start = 0
    for chunk in trace.chunks("embeddings", "embedding_labels"):
        stop = start + len(chunk["embedding_labels"])
        in_chunk = chosen[(chosen >= start) & (chosen < stop)] - start
        embeddings.append(chunk["embeddings"][in_chunk])
        labels.append(chunk["embedding_labels"][in_chunk])
        start = stop
    return np.concatenate(embeddings), np.concatenate(labels)
