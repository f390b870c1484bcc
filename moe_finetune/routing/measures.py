"""Sums over a model's records per MoE layer, and metrics computed from them.

Shape legend: T tokens, L MoE layers, E experts, K selected.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics import coherence_barrier, gram_cosine, noise_level, router_cosine
from moe_finetune.metrics.arrays import from_layer
from moe_finetune.metrics.coherence import gram_coherence
from moe_finetune.metrics.router import erc_of_norms

GATES_AT_ONCE = 8
NEEDS = frozenset({"activations_gram", "outputs_gram"})
"""Parts of a record that :class:`Measures` reads."""


class Measures:
    """Sums over tokens of probabilities, entropies and Gram matrices; metrics of the routers.

    Args:
        gate_values: also compute norms and ERC of the gates, which takes a pass over them.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        top_k: int,
        gate_values: bool = True,
    ):
        count = len(layers)
        self.layers, self.top_k = list(layers), top_k
        self.gate_values = gate_values
        self.tokens_L = np.zeros(count)
        self.probability_LE = np.zeros((count, num_experts))
        self.entropy_L = np.zeros(count)
        self.cosines_L = {"activation_cosine": np.zeros(count), "output_cosine": np.zeros(count)}
        self.coherence_L, self.below_L = np.zeros(count), np.zeros(count)
        self.router_L: dict[str, np.ndarray] = {}

    def add(self, record: RoutingRecord, at_T: Tensor | None = None) -> None:
        """Add a record's tokens, or those at the positions ``at_T``."""
        row, chosen = self.layers.index(record.layer), slice(None) if at_T is None else at_T
        with from_layer(record.layer):
            self._add(row, record, chosen)

    def _add(self, row: int, record: RoutingRecord, at_T: Any) -> None:
        distribution_TE = record.distribution_TE[at_T].double()
        if not self.tokens_L[row]:
            for name, value in router_values(record, self.gate_values).items():
                self.router_L.setdefault(name, np.full(len(self.entropy_L), np.nan))[row] = value
        tokens = len(distribution_TE)
        self.tokens_L[row] += tokens
        self.probability_LE[row] += distribution_TE.sum(0).cpu().numpy()
        self.entropy_L[row] += torch.special.entr(distribution_TE).sum().item()
        if self.top_k == 1 or not tokens:
            return
        assert record.activations_gram_TKK is not None and record.outputs_gram_TKK is not None
        outputs_TKK = record.outputs_gram_TKK[at_T].double().cpu().numpy()
        activations_TKK = record.activations_gram_TKK[at_T].double().cpu().numpy()
        self.cosines_L["activation_cosine"][row] += tokens * gram_cosine(activations_TKK)
        self.cosines_L["output_cosine"][row] += tokens * gram_cosine(outputs_TKK)
        coherence_T = gram_coherence(outputs_TKK)
        self.coherence_L[row] += coherence_T.sum()
        self.below_L[row] += (coherence_T < coherence_barrier(self.top_k)).sum()

    def mean_probability_LE(self) -> np.ndarray:
        return self.probability_LE / self.tokens_L[:, None]

    def per_layer(self) -> dict[str, list[float | None]]:
        """Metrics by name, each a list over layers; None where a layer has no value."""
        mean_LE = self.mean_probability_LE()
        metrics = {
            "entropy": self.entropy_L / self.tokens_L,
            "routing_variance": ((mean_LE - 1 / mean_LE.shape[1]) ** 2).mean(1),
        } | self.router_L
        if self.top_k > 1:
            metrics |= {name: sums_L / self.tokens_L for name, sums_L in self.cosines_L.items()}
        return {
            name: [value if np.isfinite(value) else None for value in values_L.tolist()]
            for name, values_L in metrics.items()
            if np.isfinite(values_L).any()
        }

    def coherence(self) -> dict[str, Any] | None:
        """Mutual coherence of the selected experts' outputs, in the report's format."""
        if self.top_k == 1:
            return None
        rows = zip(self.coherence_L / self.tokens_L, self.below_L / self.tokens_L, strict=True)
        return {
            "barrier": coherence_barrier(self.top_k),
            "per_layer": [{"mean": float(m), "share_below": float(s)} for m, s in rows],
        }


def router_values(record: RoutingRecord, gates: bool = True) -> dict[str, float]:
    """Metrics of one layer's weights: the router's cosine, epsilon and norms; ERC with gates.

    ``erc_loss`` is at alpha 1, ``erc_loss_alpha_2`` to ``_5`` at alpha 2 to 5 (P2 Tables 2, 3).

    The gates are read a few experts at a time, because all of a layer's gates may not fit.
    """
    # A copy: numpy would share a CPU weight's memory, which FSDP2 frees after the layer.
    router_EH = record.router_weight_EH.detach().clone().float()
    rows_E = router_EH.norm(dim=-1).cpu().numpy()
    of_router = {
        "router_cosine": router_cosine(router_EH.cpu()),
        "noise_level": noise_level(router_EH.cpu()) if rows_E.all() else float("nan"),
        "router_norm_mean": float(rows_E.mean()),
        "router_norm_std": float(rows_E.std()),
    }
    if not gates:
        return of_router
    assert record.expert_factors is not None
    factors, experts = record.expert_factors("gate"), len(router_EH)
    norms_EE, gates_E = np.zeros((experts, experts)), np.zeros(experts)
    for first in range(0, experts, GATES_AT_ONCE):
        chosen = range(first, min(first + GATES_AT_ONCE, experts))
        for expert, gate_DH in zip(chosen, factors.of(list(chosen)).float(), strict=True):
            norms_EE[:, expert] = (router_EH @ gate_DH.T).norm(dim=-1).cpu().numpy()
            gates_E[expert] = gate_DH.norm().item()
    table = erc_of_norms(norms_EE)
    return of_router | {
        "erc_loss": table["loss"][1.0],
        **{f"erc_loss_alpha_{a:g}": loss for a, loss in table["loss"].items() if a != 1},
        "erc_least_alpha": table["least_alpha"],
        "gate_norm_mean": float(gates_E.mean()),
        "gate_norm_std": float(gates_E.std()),
    }
