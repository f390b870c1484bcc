"""Routing statistics of training forwards, summed on the device and read when logged.

Shape legend: L MoE layers, T tokens, E routed experts, K selected per token.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.routing.measures_of_model import router_geometry
from moe_finetune.routing.sums import CHOICES, Sums
from moe_finetune.training import ranks


class TrainingStatistics:
    """Observer that sums on the device until :meth:`read`, so that a GPU never waits for the host.

    ``names``: terms whose values are summed. Every rank must name all of them, so that one without
    a forward takes part in the same sums.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, names: Sequence[str] = ()):
        self.layers = list(layers)
        self.num_experts = num_experts
        self._sums = self._none()
        self.names = list(names)
        self._routers: dict[int, Tensor] = {}  # (2,): cosine and noise level, by layer
        self._losses: dict[str, Tensor] = {}
        self._forwards = 0
        self._strength: dict[str, float] = {}
        self._changed: Tensor | None = None  # tokens with other experts in a recomputation
        self._repeated = 0  # all tokens that ran again

    def note_repeated(self, changed: Tensor, tokens: int) -> None:
        """Count the tokens of a layer that ran again in the backward."""
        total = self._changed
        self._changed = changed if total is None else total + changed.to(total.device)
        self._repeated += tokens

    def note_strength(self, rows: Sequence[Any]) -> None:
        """Keep measured strengths, rows of ``TermStrength``, for the next :meth:`read`."""
        self._strength = {
            f"strength/{row.term}/{name}": value
            for row in rows
            for name, value in row.row().items()
            if isinstance(value, float)
        }

    def __call__(self, record: RoutingRecord, loss: LayerLoss) -> None:
        self._sums.add(record)
        weight_EH = record.router_weight_EH
        if weight_EH is not None and record.layer not in self._routers:
            self._routers[record.layer] = router_geometry(weight_EH)
        for name, value in loss.values.items():
            total = self._losses.get(name)
            self._losses[name] = value.double() if total is None else total + value
        if record.layer == self.layers[0]:
            self._forwards += 1

    def _none(self) -> Sums:
        return Sums(self.layers, self.num_experts, (*CHOICES, "score", "square", "entropy"))

    def read(self) -> dict[str, float]:
        """Return the values since the last read, over all ranks, and reset the sums.

        ``losses/<term>``: unweighted, summed over layers, mean over forwards. Loads are in
        :attr:`last_load_LE`. ``routing/*``: means over layers, each from all tokens since the last
        read; ``router_cosine`` and ``noise_level`` (the mean epsilon of ERC's noise) describe the
        routers at the first forward since then; ``changed_in_recomputation``: the share of tokens,
        over layers that checkpointing ran again, for which the router would have selected other
        experts. ``strength/<term>/*``: present after a measurement.
        """
        together = ranks.world_size() > 1
        if not together and not self._forwards:
            return {}
        names = sorted(set(self._losses) | set(self.names))
        sums = self._sums.tensor(self._sums.device or ranks.device())
        zero = sums.new_zeros(())
        values = torch.stack(
            [self._losses.get(name, zero) for name in names]
            + [zero if self._changed is None else self._changed.to(zero.device)]
            + [sums.new_tensor(float(count)) for count in (self._repeated, self._forwards)]
        )
        if together:
            torch.distributed.all_reduce(values)
            torch.distributed.all_reduce(sums)
            if not values[-1]:
                return {}
        numbers = (values[: len(names)] / values[-1]).tolist()
        changed, repeated = values[len(names) : -1].tolist()
        self._changed, self._repeated = None, 0
        routers = list(self._routers.values())
        read, self._sums, self._losses, self._forwards = self._sums, self._none(), {}, 0
        self._routers = {}
        strength, self._strength = self._strength, {}
        sums_LW = sums[0].cpu().numpy()
        load = torch.from_numpy(read.column(sums_LW, "load")).to(torch.int64)
        self.last_load_LE = load
        metrics = read.metrics(sums_LW)
        entropy = float(metrics["entropy"].mean())
        router_means = torch.stack(routers).double().mean(0).tolist() if routers else []
        return {
            **{f"losses/{name}": mean for name, mean in zip(names, numbers, strict=True)},
            **strength,
            "routing/max_violation": float(metrics["max_violation"].mean()),
            "routing/max_violation_worst_layer": float(metrics["max_violation"].max()),
            "routing/entropy": entropy,
            "routing/entropy_share": entropy / math.log(max(self.num_experts, 2)),
            "routing/score_variance": float(metrics["score_variance"].mean()),
            "routing/dead_experts": float((load == 0).sum(1).double().mean()),
            **dict(
                zip(("routing/router_cosine", "routing/noise_level"), router_means, strict=False)
            ),
            **({"routing/changed_in_recomputation": changed / repeated} if repeated else {}),
        }
