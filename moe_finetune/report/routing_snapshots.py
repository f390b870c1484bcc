"""A routing snapshot: ``routing/before.json`` and ``routing/after.json`` of a run's folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.metrics.routing import collapse_limit
from moe_finetune.report.markup import number


@contextmanager
def reading(path: Path, entry: str) -> Iterator[None]:
    """Turn the error of a malformed entry into a TraceError with file and entry."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path}: '{entry}' is missing or malformed ({type(error).__name__}: {error}); write "
            "the snapshot again with `moe-finetune analyze`"
        ) from None


@dataclass(frozen=True)
class Metric:
    """A routing metric: its mean over layers, and its value in each layer if known."""

    mean: float
    per_layer: list[float] | None = None


@dataclass(frozen=True)
class Coherence:
    """Mutual coherence of the tokens' experts by layer, and the share of tokens below the barrier.

    Below ``barrier`` a token's experts are guaranteed to be distinguishable.
    """

    barrier: float
    means: list[float]
    shares_below: list[float]


@dataclass(frozen=True)
class Routing:
    """Measurements of the router on a set of tokens.

    Suffixes: L layers, E routed experts, G domains.
    """

    path: Path
    layers: list[int]
    num_experts: int
    load_LE: np.ndarray
    data: dict[str, Any]

    @classmethod
    def parse(cls, data: dict[str, Any], path: Path) -> Routing:
        """Check the entries that every snapshot needs."""
        for key in ("layers", "num_experts", "load"):
            with reading(path, key):
                data[key]
        layers, experts = data["layers"], data["num_experts"]
        if not isinstance(layers, list) or not layers or not isinstance(experts, int):
            raise TraceError(f"{path}: 'layers' must be a list and 'num_experts' an integer")
        load_LE = _matrix(data["load"], (len(layers), experts), path, "load")
        return cls(path, layers, experts, load_LE, data)

    @property
    def top_k(self) -> int | None:
        """Experts selected per token, if the snapshot has it."""
        return self.data.get("top_k")

    @property
    def measured_on(self) -> tuple[object, ...]:
        """An identity of the sample: its number of tokens, and the tokens of its passages."""
        with reading(self.path, "colored_text"):
            passages = self.data.get("colored_text") or []
            return self.data.get("tokens"), *(t for text in passages for t in text["tokens"])

    def relative_load_LE(self) -> np.ndarray:
        """Return each expert's load as a multiple of an even share; NaN in layers without any."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.load_LE / self.load_LE.mean(1, keepdims=True)

    def collapse(self) -> str | None:
        """Describe a collapsed router: a few experts of some layer take nearly every token."""
        if self.top_k is None or self.top_k >= self.num_experts:
            return None
        worst = float(np.nanmax(self.relative_load_LE())) - 1
        unused = float(np.mean(self.load_LE == 0))
        if worst <= collapse_limit(self.num_experts, self.top_k) and unused <= 0.5:
            return None
        return (
            f"Routing collapsed: the worst layer's MaxVio is {number(worst)} (the largest possible "
            f"is {number(self.num_experts / self.top_k - 1)}), and {100 * unused:.0f} % of the "
            "experts get no token. Changes in the experts are not specialization."
        )

    def conditional(self) -> tuple[list[int], np.ndarray] | None:
        """Return the two layers and the E x E matrix P(next layer's expert given this one's)."""
        entry = self.data.get("conditional_activation")
        if not entry:
            return None
        shape, name = (self.num_experts, self.num_experts), "conditional_activation.matrix"
        return list(entry["layers"]), _matrix(entry["matrix"], shape, self.path, name)

    def domains(self) -> tuple[list[str], np.ndarray] | None:
        """Return the domains that have tokens and their dispatch counts, G x L x E."""
        shape = (len(self.layers), self.num_experts)
        counts = {
            name: _matrix(rows, shape, self.path, f"domains.{name}")
            for name, rows in (self.data.get("domains") or {}).items()
        }
        used = {name: counts_LE for name, counts_LE in counts.items() if counts_LE.sum(1).all()}
        return (list(used), np.stack(list(used.values()))) if used else None

    def coherence(self) -> Coherence | None:
        """Return the coherence by layer."""
        entry = self.data.get("coherence")
        if not entry:
            return None
        with reading(self.path, "coherence"):
            rows = entry["per_layer"]
            means, shares = ([float(row[key]) for row in rows] for key in ("mean", "share_below"))
            return Coherence(float(entry["barrier"]), means, shares)

    def metrics(self) -> dict[str, Metric]:
        """Return every metric; MaxVio is computed from the load if it is not among them."""
        with reading(self.path, "metrics"):
            metrics = {
                name: _metric(entry.get("mean"), entry.get("per_layer"))
                for name, entry in (self.data.get("metrics") or {}).items()
            }
        if "max_violation" not in metrics:
            violations = (self.relative_load_LE().max(1) - 1).tolist()
            metrics = {
                "max_violation": _metric(float(np.nanmean(violations)), violations),
                **metrics,
            }
        return metrics


def _metric(mean: float | None, per_layer: list[float | None] | None) -> Metric:
    """A metric whose missing values are NaN."""
    values = None if per_layer is None else [math.nan if v is None else float(v) for v in per_layer]
    return Metric(math.nan if mean is None else float(mean), values)


def _matrix(values: Any, shape: tuple[int, int], path: Path, entry: str) -> np.ndarray:
    with reading(path, entry):
        matrix = np.asarray(values, dtype=float)  # None becomes NaN
    if matrix.shape != shape:
        raise TraceError(f"{path}: '{entry}' has shape {matrix.shape}, expected {shape}")
    return matrix
