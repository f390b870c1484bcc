"""A routing snapshot: ``routing/before.json`` and ``routing/after.json`` of a run's folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.metrics.load import collapse_limit
from moe_finetune.report.markup import is_number, number

# what a snapshot holds besides metrics
STRUCTURE = (
    "layers", "num_experts", "top_k", "tokens", "data", "load", "mean_probability", "metrics",
    "conditional_activation", "domains", "embeddings", "gate_rows_tsne", "coherence",
    "colored_text",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A routing metric: its mean over layers, and its value in each layer where known."""

    mean: float
    per_layer: list[float] | None = None


@dataclass(frozen=True)
class Coherence:
    """Mutual coherence of the tokens' experts: its mean, the barrier, the share of tokens below."""

    name: str
    mean: float
    barrier: float
    share_below: float

    @classmethod
    def parse(cls, name: str, value: Any, common: dict[str, Any]) -> Coherence:
        """Read a summary, or a bare mean whose barrier stands in ``common``."""
        summary = {**common, **value} if isinstance(value, dict) else {**common, "mean": value}
        below = summary.get("share_below")
        return cls(
            name,
            float(summary["mean"]),
            float(summary["barrier"]),
            float(below) if is_number(below) else math.nan,
        )


@dataclass(frozen=True)
class Routing:
    """What was measured of the router on a set of tokens.

    Suffixes: L layers, E routed experts, G domains.
    """

    path: Path
    layers: list[int]
    num_experts: int
    load_LE: np.ndarray
    data: dict[str, Any]

    @classmethod
    def parse(cls, data: Any, path: Path) -> Routing:
        """Check a snapshot's shape.

        Raises:
            TraceError: a key that every snapshot needs is missing, or a matrix has another shape
                than layers x experts.
        """
        if not isinstance(data, dict):
            raise TraceError(f"{path}: expected an object with 'layers', 'num_experts', 'load'")
        for key in ("layers", "num_experts", "load"):
            if key not in data:
                raise TraceError(
                    f"{path}: key '{key}' is missing; write the snapshot again with "
                    "`moe-finetune analyze`"
                )
        layers, experts = data["layers"], data["num_experts"]
        if not isinstance(layers, list) or not layers or not isinstance(experts, int):
            raise TraceError(f"{path}: 'layers' must be a list and 'num_experts' a whole number")
        shape = (len(layers), experts)
        load_LE = _matrix(data["load"], shape, f"{path}: 'load'")
        return cls(path, layers, experts, load_LE, data)

    @property
    def top_k(self) -> int | None:
        """Experts selected per token, if the snapshot says so."""
        return self.data.get("top_k")

    @property
    def measured_on(self) -> tuple[object, ...]:
        """What tells one sample of tokens from another: how many, and those of its passages."""
        passages = self.data.get("colored_text") or []
        return (self.data.get("tokens"), *(t for text in passages for t in text.get("tokens", ())))

    def relative_load_LE(self) -> np.ndarray:
        """Return each expert's load as a multiple of an even share; NaN in a layer without any."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.load_LE / self.load_LE.mean(1, keepdims=True)

    def matrix(self, key: str) -> np.ndarray | None:
        """Return an optional layers x experts matrix.

        Raises:
            TraceError: the matrix has another shape.
        """
        if self.data.get(key) is None:
            return None
        shape = (len(self.layers), self.num_experts)
        return _matrix(self.data[key], shape, f"{self.path}: '{key}'")

    def collapse(self) -> str | None:
        """Describe a collapsed router: a few experts of some layer take nearly every token."""
        if self.top_k is None or self.top_k >= self.num_experts:
            return None
        relative_LE = self.relative_load_LE()
        worst = float(np.nanmax(relative_LE)) - 1
        unused = float(np.mean(self.load_LE == 0))
        limit = collapse_limit(self.num_experts, self.top_k)
        if worst <= limit and unused <= 0.5:
            return None
        return (
            f"Routing collapsed: the worst layer's MaxVio is {number(worst)} of at most "
            f"{number(self.num_experts / self.top_k - 1)}, and {100 * unused:.0f} % of the experts "
            "get no token. Changes in the experts are not specialization."
        )

    def conditional(self) -> tuple[list[int], np.ndarray] | None:
        """Return the two layers and the E x E matrix P(next layer's expert given this one's)."""
        found = self.data.get("conditional_activation")
        if not found:
            return None
        shape = (self.num_experts, self.num_experts)
        where = f"{self.path}: 'conditional_activation.matrix'"
        return list(found["layers"]), _matrix(found["matrix"], shape, where)

    def domains(self) -> tuple[list[str], np.ndarray] | None:
        """Return the domains that have tokens and their dispatch counts, G x L x E."""
        found = self.data.get("domains") or {}
        shape = (len(self.layers), self.num_experts)
        counts = {n: _matrix(c, shape, f"{self.path}: 'domains.{n}'") for n, c in found.items()}
        names = [name for name, count in counts.items() if count.sum(1).all()]
        return (names, np.stack([counts[name] for name in names])) if names else None

    def coherence(self) -> list[Coherence]:
        """Return the coherence of each layer, or of all together where that is what is known.

        Raises:
            TraceError: the entry is of a form that is not known.
        """
        found = self.data.get("coherence")
        if not found:
            return []
        layers = found.get("per_layer", found) if isinstance(found, dict) else found
        try:
            if isinstance(layers, dict):
                return [Coherence.parse("all", layers, {})]
            names = [f"layer {layer}" for layer in self.layers]
            common = found if isinstance(found, dict) else {}
            return [Coherence.parse(n, v, common) for n, v in zip(names, layers, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{self.path}: 'coherence' must give 'mean' and 'barrier', for each layer in "
                f"'per_layer' or for all together ({error!r})"
            ) from None

    def metrics(self) -> dict[str, Metric]:
        """Return every metric; MaxVio is computed from the load when it was not written."""
        named = self.data.get("metrics") or {}
        beside = {k: v for k, v in self.data.items() if k not in (*STRUCTURE, *named)}
        found = {name: _metric(value) for name, value in {**named, **beside}.items()}
        known = {name: metric for name, metric in found.items() if metric is not None}
        if "max_violation" not in known:
            relative_LE = self.relative_load_LE()
            per_layer = (relative_LE.max(1) - 1).tolist()
            known = {"max_violation": Metric(_mean(per_layer), per_layer), **known}
        return known


def _metric(value: Any) -> Metric | None:
    if is_number(value):
        return Metric(float(value))
    if isinstance(value, list) and all(v is None or is_number(v) for v in value):
        return Metric(_mean(value), [math.nan if v is None else float(v) for v in value])
    if isinstance(value, dict) and ("mean" in value or "per_layer" in value):
        per_layer = value.get("per_layer")
        if per_layer is not None and not isinstance(per_layer, list):
            per_layer = None
        mean = value.get("mean")
        return Metric(
            float(mean) if is_number(mean) else _mean(per_layer or []),
            None
            if per_layer is None
            else [float(v) if is_number(v) else math.nan for v in per_layer],
        )
    return None


def _mean(values: list[Any]) -> float:
    finite = [v for v in values if is_number(v) and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _matrix(value: Any, shape: tuple[int, int], where: str) -> np.ndarray:
    try:
        matrix = np.asarray(value, dtype=float)  # None becomes NaN
    except (TypeError, ValueError) as error:
        raise TraceError(f"{where} is not a matrix of numbers: {error}") from None
    if matrix.shape != shape:
        raise TraceError(f"{where} has shape {matrix.shape}, wanted {shape}")
    return matrix
