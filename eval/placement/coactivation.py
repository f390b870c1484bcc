"""How often experts serve the same token, within a layer and in adjacent layers.

Shape legend: T tokens, L MoE layers, K selected per token, E routed experts, R ranks, S = E/R
experts per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_finetune.metrics.paths import pair_counts

MAX_PAIRS = 1_000_000_000
DRIFT_BLOCKS = 32


@dataclass(frozen=True)
class Coactivation:
    """Counts of a trace, integers in float64 so that sums are exact in any order.

    Attributes:
        within_LEE: tokens that both experts of a layer serve, weighted by ``K``; diagonal 0.
        across_LEE: tokens that expert e of layer l and expert n of layer l + 1 serve, weighted by
            ``K - 1``; one entry fewer than layers. With these weights, pairs within a layer (K(K-1)
            of them) and between layers (K^2) contribute equally.
        load_LE: dispatches to each expert.
        blocks_BLE: ``load / mean load`` of each expert in B consecutive blocks of the trace, from
            which :meth:`drift` follows.
    """

    within_LEE: np.ndarray
    across_LEE: np.ndarray
    load_LE: np.ndarray
    blocks_BLE: np.ndarray
    top_k: int

    def drift(self, slots_LRS: np.ndarray) -> float:
        """How far a rank's ``load / mean load`` moves between this trace and an equally long one.

        One standard deviation, averaged over layers and ranks that have the experts ``slots_LRS``.
        The means of B past and B future blocks of tokens differ with twice the variance of one
        mean. It is estimated from successive blocks (half the mean squared difference), so that a
        single change of task within the trace, for which the plan is made, is no drift.
        """
        blocks, layers, _ = self.blocks_BLE.shape
        if blocks < 2:
            return 0.0
        loads = self.blocks_BLE[:, np.arange(layers)[:, None, None], slots_LRS].mean(-1)
        variance_LR = (np.diff(loads, axis=0) ** 2).mean(0) / 2
        return float(np.sqrt(2 * variance_LR / blocks).mean())


def count_coactivation(index_TLK: np.ndarray, num_experts: int) -> Coactivation:
    """Count the co-activations of a trace, thinned evenly to about a billion pairs."""
    tokens, layers, width = index_TLK.shape
    step = -(-tokens * layers * 2 * width * width // MAX_PAIRS)
    # Never fewer than cover every pair of experts several times.
    index = index_TLK[:: max(1, min(step, tokens // (16 * num_experts)))]
    within = np.zeros((layers, num_experts, num_experts))
    across = np.zeros((layers - 1, num_experts, num_experts))
    for layer in range(layers):
        experts_TK = index[:, layer]
        within[layer] = pair_counts(experts_TK, experts_TK, num_experts)
        if layer + 1 < layers:
            across[layer] = pair_counts(experts_TK, index[:, layer + 1], num_experts)
    load = np.einsum("lee->le", within).copy()
    np.einsum("lee->le", within)[:] = 0
    blocks = np.array_split(index, min(DRIFT_BLOCKS, len(index)))
    bins = np.arange(layers)[:, None] * num_experts  # of an expert of a layer
    loads = np.stack(
        [
            np.bincount((block + bins).ravel(), minlength=load.size).reshape(load.shape)
            for block in blocks
        ]
    )
    relative = loads / loads.mean(-1, keepdims=True)
    return Coactivation(within * width, across * max(width - 1, 1), load, relative, width)
