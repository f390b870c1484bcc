"""A routing snapshot as JSON, in a run's ``routing/before.json`` and ``after.json``.

The report reads it (:mod:`moe_finetune.report.routing_snapshots`). Parts that were not measured are
absent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_finetune.metrics.arrays import mean_known
from moe_finetune.models.tokenizer import Tokenizer

PASSAGE = 150
PASSAGES = 4
"""Numbers of tokens per passage, and of passages, that the report colors."""


def routing_path(
    layers: Sequence[int], load_LE: np.ndarray, tokens: int, top_k: int, matrix_EE: Any = None
) -> dict[str, Any]:
    """Load of every layer; ``matrix_EE``: P(next layer's expert | middle layer's expert)."""
    routing: dict[str, Any] = {
        "layers": list(layers),
        "num_experts": load_LE.shape[1],
        "top_k": top_k,
        "tokens": tokens,
        "load": load_LE.tolist(),
    }
    if matrix_EE is not None:
        middle = len(layers) // 2
        routing["conditional_activation"] = {
            "layers": list(layers[middle : middle + 2]),
            "matrix": np.asarray(matrix_EE).round(4).tolist(),
        }
    return routing


def snapshot(
    path: Mapping[str, Any],
    metrics: Mapping[str, Sequence[float | None]],
    coherence: Mapping[str, Any] | None = None,
    domains: Mapping[str, Any] | None = None,
    passages: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Assemble a snapshot from the results of :func:`routing_path`, :meth:`Measures.per_layer`,
    :meth:`Measures.coherence` and :func:`passage`, and selections ``(L, E)`` by domain."""
    picture: dict[str, Any] = {
        **path,
        "metrics": {
            name: {"per_layer": list(values), "mean": mean_known(values)}
            for name, values in metrics.items()
        },
    }
    if domains is not None and len(domains) > 1:
        picture["domains"] = {name: np.asarray(c).tolist() for name, c in domains.items()}
    if coherence is not None:
        picture["coherence"] = coherence
    if passages is not None:
        picture["colored_text"] = list(passages)
    return picture


def passage(
    tokenizer: Tokenizer,
    layer: int,
    domain: str,
    ids_T: Iterable[int],
    top_T: np.ndarray,
    index_TK: np.ndarray,
) -> dict[str, Any]:
    """The tokens of a text with their top expert and all selected ones in one layer."""
    return {
        "layer": layer,
        "domain": domain,
        "tokens": [tokenizer.decode([int(token)]) for token in ids_T],
        "experts": np.asarray(top_T).tolist(),
        "selected": np.asarray(index_TK).tolist(),
    }
