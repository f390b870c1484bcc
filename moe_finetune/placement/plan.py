"""The placement plan as a file, and the permutation of experts that applies it to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_finetune.errors import DataError
from moe_finetune.io import write_new
from moe_finetune.io.json_file import parse_json
from moe_finetune.metrics.arrays import Array, integers

FORMAT = "moe-finetune placement plan"


@dataclass(frozen=True)
class PlacementPlan:
    """Which rank stores each expert of each MoE layer of one model.

    Attributes:
        model_type: transformers' ``model_type``.
        layers: decoder layer of each row of ``ranks_LE``, ascending.
        num_ranks: R.
        ranks_LE: int64 ``(L, E)``, exactly E/R experts per rank and layer.
    """

    model_type: str
    layers: tuple[int, ...]
    num_ranks: int
    ranks_LE: np.ndarray

    @classmethod
    def of(
        cls, model_type: str, layers: Sequence[int], num_ranks: int, ranks_LE: Array
    ) -> PlacementPlan:
        """Build and check a plan from ``plan_placement``'s ranks; DataError names what is wrong."""
        ranks = integers("ranks_LE", ranks_LE, (len(layers), "E")).astype(np.int64)
        plan = cls(model_type, tuple(int(layer) for layer in layers), int(num_ranks), ranks)
        plan._validate("placement plan")
        return plan

    @property
    def num_experts(self) -> int:
        return self.ranks_LE.shape[1]

    def permutation_LE(self) -> np.ndarray:
        """Old expert index at each new position, ``(L, E)``: rank by rank, ascending inside.

        A checkpoint reordered this way gets the placement from any engine that gives rank r the
        experts ``r E/R`` to ``(r + 1) E/R - 1`` (vLLM's ``linear`` placement).
        """
        return np.argsort(self.ranks_LE, axis=-1, kind="stable")

    def check(self, model_type: str, layers: Sequence[int], num_experts: int) -> None:
        """Raise DataError unless the plan fits this model type, layers and number of experts."""
        for what, got, expected in (
            ("model type", self.model_type, model_type),
            ("MoE layers", list(self.layers), list(layers)),
            ("experts a layer", self.num_experts, num_experts),
        ):
            if got != expected:
                raise DataError(
                    f"placement plan: made for {what} {got}, this checkpoint has {expected}; "
                    "plan again with 'moe-finetune place' on a trace of this checkpoint"
                )

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON to a new file; raise OutputExistsError if the file exists."""
        document = {
            "format": FORMAT,
            "model_type": self.model_type,
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
            "layers": {
                str(layer): {"ranks": ranks.tolist(), "permutation": order.tolist()}
                for layer, ranks, order in zip(
                    self.layers, self.ranks_LE, self.permutation_LE(), strict=True
                )
            },
        }
        write_new(Path(path), json.dumps(document) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> PlacementPlan:
        """Read and check a plan; DataError names the file, the layer and what is wrong there."""
        try:
            document = parse_json(Path(path).read_bytes())
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise DataError(f"{path}: not a {FORMAT}; write one with 'moe-finetune place'")
            rows = {int(layer): entry["ranks"] for layer, entry in document["layers"].items()}
            layers = tuple(sorted(rows))
            ranks = integers("ranks", [rows[layer] for layer in layers], ("L", "E"))
            plan = cls(str(document["model_type"]), layers, int(document["num_ranks"]), ranks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path}: cannot be read as a placement plan ({type(error).__name__}: {error})"
            ) from error
        plan._validate(str(path))
        return plan

    def _validate(self, where: str) -> None:
        experts, ranks = self.num_experts, self.num_ranks
        if ranks < 1 or experts % ranks:
            raise DataError(f"{where}: {ranks} ranks do not divide {experts} experts")
        if any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise DataError(f"{where}: layers {list(self.layers)} are not ascending")
        for layer, row in zip(self.layers, self.ranks_LE, strict=True):
            inside = row.min() >= 0 and row.max() < ranks
            counts = np.bincount(row, minlength=ranks) if inside else None
            if counts is None or (counts != experts // ranks).any():
                problem = row.tolist() if counts is None else counts.tolist()
                raise DataError(
                    f"{where}: layer {layer}: expected {experts // ranks} experts on each of "
                    f"{ranks} ranks, got {problem}"
                )
