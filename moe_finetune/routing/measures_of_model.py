"""What a trace or a sample of a model measures: sums over tokens, and values of its weights."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.errors import NumericsError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.losses.erc import erc_from_table, noise_width
from moe_finetune.losses.gram import cosines, gram
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics.coherence import coherence_barrier
from moe_finetune.routing.sums import CHOICES, COSINES, PROBABILITIES, SCORES, Sums, as_double

GATES_AT_ONCE = 8
ALPHAS = (1, 2, 3, 4, 5)


class Measures:
    """Sums of all columns, and the routers' values at the first forward.

    Args:
        gate_values: also norms and ERC of the gates, which takes a pass over them.
    """

    def __init__(self, facts: ModelFacts, gate_values: bool = False, groups: int = 1):
        pairs = COSINES if facts.top_k > 1 else ()
        columns = (*CHOICES, *SCORES, *PROBABILITIES, *pairs, "coupling_mass")
        self.sums = Sums(facts.moe_layers, facts.num_experts, columns, groups)
        self.top_k, self.gate_values = facts.top_k, gate_values
        self._routers: dict[int, dict[str, float]] = {}

    def add(
        self, record: RoutingRecord, group_T: Tensor | None = None, at_T: Tensor | None = None
    ) -> None:
        """As :meth:`Sums.add`."""
        if record.layer not in self._routers:
            self._routers[record.layer] = router_values(record, self.gate_values)
        self.sums.add(record, group_T, at_T)

    def check(self) -> np.ndarray:
        """The sums over all groups ``(L, W)``; NumericsError names a layer with NaN or infinity."""
        sums_LW = self.sums.array().sum(0)
        for layer, row in zip(self.sums.layers, sums_LW, strict=True):
            if not np.isfinite(row).all():
                raise NumericsError(
                    f"layer {layer}: the model computes NaN or infinity. Its weights are finite "
                    "but too large; restore the checkpoint, load it in a wider dtype, or, after "
                    "training, lower trainer.learning_rate"
                )
        return sums_LW

    def per_layer(self) -> dict[str, list[float | None]]:
        """Metrics by name, each a list over layers; None where a layer has no value."""
        sums_LW = self.check()
        metrics = {name: values_L.tolist() for name, values_L in self.sums.metrics(sums_LW).items()}
        metrics["coupling_mass"][0] = None  # no layer lies below
        tables = [self._routers.get(layer, {}) for layer in self.sums.layers]
        for name in tables[0]:
            metrics[name] = [table.get(name) for table in tables]
        return {
            name: values for name, values in metrics.items() if any(v is not None for v in values)
        }

    def coherence(self, metrics: dict[str, list[float | None]]) -> dict[str, Any] | None:
        """Mutual coherence of the selected experts' outputs, in the report's format."""
        if self.top_k == 1:
            return None
        rows = zip(metrics["mutual_coherence"], metrics["below_barrier"], strict=True)
        return {
            "barrier": coherence_barrier(self.top_k),
            "per_layer": [{"mean": mean, "share_below": share} for mean, share in rows],
        }


def router_geometry(weight_EH: Tensor) -> Tensor:
    """Mean absolute cosine of a router's rows (P2 4.5), and mean width of ERC's noise (Fig. 5a)."""
    rows_EH = as_double(weight_EH.detach().float())
    experts = len(rows_EH)
    total = cosines(gram(rows_EH[None])).abs().sum()
    return torch.stack([total / (experts * (experts - 1)), noise_width(rows_EH).mean()])


def least_alpha(table_EE: Tensor) -> float:
    """The smallest alpha without an ERC loss, from the table ``M``; infinite if some M_ii is 0."""
    rivals_E = torch.maximum(table_EE, table_EE.T).clone().fill_diagonal_(0).amax(1)
    return torch.where(rivals_E > 0, rivals_E / table_EE.diagonal(), 0.0).max().item()


def router_values(record: RoutingRecord, gates: bool = True) -> dict[str, float]:
    """Metrics of one layer's weights: the router's geometry and norms; ERC and norms of gates.

    ``erc_loss`` is at alpha 1, ``erc_loss_alpha_2`` to ``_5`` at alpha 2 to 5 (P2 Tables 2, 3);
    ``erc_least_alpha`` is the smallest alpha without a loss.

    The gates are read a few experts at a time, because all of a layer's gates may not fit.
    """
    # A copy: FSDP2 frees a weight after the layer.
    router_EH = record.router_weight_EH.detach().clone().float()
    cosine, width = router_geometry(router_EH).tolist()
    values = {"router_cosine": cosine, "noise_level": width}
    rows_E = router_EH.norm(dim=-1)
    if gates:
        assert record.expert_factors is not None
        factors, experts = record.expert_factors("gate"), range(len(router_EH))
        answers, gates_E = [], []
        for first in experts[::GATES_AT_ONCE]:
            for gate_DH in factors.of(list(experts[first : first + GATES_AT_ONCE])).float():
                answers.append((router_EH @ gate_DH.T).norm(dim=-1))
                gates_E.append(gate_DH.norm())
        table_EE = torch.stack(answers, 1).double()
        losses = {alpha: erc_from_table(table_EE, alpha).item() for alpha in ALPHAS}
        values |= {
            "erc_loss": losses.pop(1),
            **{f"erc_loss_alpha_{alpha}": loss for alpha, loss in losses.items()},
            "erc_least_alpha": least_alpha(table_EE),
        } | _spread("gate", torch.stack(gates_E))
    return values | _spread("router", rows_E)


def _spread(name: str, norms_E: Tensor) -> dict[str, float]:
    deviation, mean = torch.std_mean(norms_E, correction=0)
    return {f"{name}_norm_mean": mean.item(), f"{name}_norm_std": deviation.item()}
