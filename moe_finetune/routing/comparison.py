"""Compare two traces: what changed, and whether by more than chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.metrics.paths import top_choice
from moe_finetune.routing.sums_of_trace import gather

if TYPE_CHECKING:
    from moe_finetune.routing.sums import Sums
    from moe_finetune.routing.trace import RoutingTrace, TraceChunk

MAX_UNITS = 2048


def compare_traces(
    a: RoutingTrace,
    b: RoutingTrace,
    bootstrap: int = 10_000,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Any]:
    """Metric differences ``b - a`` and path stability, with bootstrap intervals over sequences.

    Tokens of a sequence are not independent, so whole sequences are resampled (percentile
    intervals). More than 2,048 sequences are merged with their neighbors into 2,048 units. If both
    traces contain the same sequences (``paired``), each replicate draws the same ones for both,
    which cancels variation in the data, and path stability is defined.

    Args:
        a, b: traces of equal model type, layers, experts and top-k; TraceError otherwise.
        bootstrap: number of replicates.
        level: confidence level of the intervals.

    Returns ``paired``, ``units`` (of a and b), ``metrics`` {name: {``a``, ``b``, ``difference``,
    ``low``, ``high``}} of means over layers, ``per_layer`` {name: differences over layers}, and,
    when paired, ``path_stability`` {``value``, ``low``, ``high``, ``per_layer``} (else None).
    """
    if bootstrap < 1 or not 0 < level < 1:
        raise ValueError(
            f"bootstrap, level: got {bootstrap}, {level}, expected >= 1, 0 < level < 1"
        )
    _check_comparable(a, b)
    units_a, units_b = _Units(a), _Units(b)
    paired = units_a.same_as(units_b)
    sums_a, sums_b = units_a.sums(), units_b.sums()
    stable_UL = _stable(a, b, units_a) if paired else None
    tokens_U = sums_a.column(sums_a.array(), "tokens")[:, 0]

    metrics_a, metrics_b = sums_a.metrics(), sums_b.metrics()
    names = [name for name in metrics_a if name in metrics_b]
    differences: dict[str, list[np.ndarray]] = {name: [] for name in names}
    stabilities: list[np.ndarray] = []
    rng = np.random.default_rng(seed)
    # A block of replicates has about 4 million sums at a time.
    block = max(1, min(bootstrap, 4_000_000 // sums_a.array()[0].size))
    for start in range(0, bootstrap, block):
        count = min(block, bootstrap - start)
        draw_a = _draw(rng, count, units_a.count)
        draw_b = draw_a if paired else _draw(rng, count, units_b.count)
        found_a = sums_a.weighted(draw_a)
        found_b = sums_b.weighted(draw_b)
        for name in names:
            differences[name].append((found_b[name] - found_a[name]).mean(-1))
        if stable_UL is not None:
            stabilities.append((draw_a @ stable_UL).mean(-1) / (draw_a @ tokens_U))
    return {
        "paired": paired,
        "units": [units_a.count, units_b.count],
        "bootstrap": bootstrap,
        "level": level,
        "metrics": {
            name: {
                "a": float(metrics_a[name].mean()),
                "b": float(metrics_b[name].mean()),
                "difference": float((metrics_b[name] - metrics_a[name]).mean()),
                **_interval(differences[name], level),
            }
            for name in names
        },
        "per_layer": {name: (metrics_b[name] - metrics_a[name]).tolist() for name in names},
        "path_stability": None
        if stable_UL is None
        else {
            "value": float(stable_UL.sum() / (tokens_U.sum() * stable_UL.shape[1])),
            "per_layer": (stable_UL.sum(0) / tokens_U.sum()).tolist(),
            **_interval(stabilities, level),
        },
    }


class _Units:
    """The sequences of a trace, or runs of neighboring ones, as resampling units."""

    def __init__(self, trace: RoutingTrace):
        self.trace = trace
        self.seq_T = trace.load("seq")
        names = np.unique(self.seq_T)
        self.count = min(len(names), MAX_UNITS)
        unit_of_name = np.arange(len(names)) * self.count // len(names)
        self.unit_T = unit_of_name[np.searchsorted(names, self.seq_T)].astype(np.int32)

    def same_as(self, other: _Units) -> bool:
        """Whether both traces contain the same tokens in the same order."""
        if not np.array_equal(self.seq_T, other.seq_T):
            return False
        if self.trace.has("token_ids") and other.trace.has("token_ids"):
            return np.array_equal(self.trace.load("token_ids"), other.trace.load("token_ids"))
        return True

    def sums(self) -> Sums:
        return gather(self.trace, self.of, self.count, "seq")

    def of(self, chunk: TraceChunk) -> np.ndarray:
        return self.unit_T[chunk.start : chunk.start + chunk.tokens]


def check_same_rows(before: RoutingTrace, after: RoutingTrace) -> None:
    """Refuse traces of different models or of different rows."""
    from moe_finetune.errors import TraceError

    _check_comparable(before, after)
    if not _Units(before).same_as(_Units(after)):
        raise TraceError(
            f"{after.path}: has other rows than {before.path}; record both with the same --data "
            "and --limit"
        )


def _check_comparable(a: RoutingTrace, b: RoutingTrace) -> None:
    from moe_finetune.errors import TraceError

    b.check(model_type=a.info.model_type, layers=a.info.layers, num_experts=a.info.num_experts)
    if a.info.top_k != b.info.top_k:
        raise TraceError(
            f"{b.path}: {b.info.top_k} experts per token, {a.path} has {a.info.top_k}; compare "
            "two traces of the same model"
        )


def _stable(a: RoutingTrace, b: RoutingTrace, units: _Units) -> np.ndarray | None:
    """Tokens per unit and layer that keep their top-1 expert, ``(U, L)``; None without weights."""
    if not (a.has("weights") and b.has("weights")):
        return None
    same_TL = _top_choices(a) == _top_choices(b)
    stable_LU = [np.bincount(units.unit_T, same_T, units.count) for same_T in same_TL.T]
    return np.stack(stable_LU, axis=1)


def _top_choices(trace: RoutingTrace) -> np.ndarray:
    """Top-1 experts ``(T, L)`` of the whole trace; chunks of two traces may end differently."""
    chunks = trace.chunks("ids", "weights")
    return np.concatenate([top_choice(chunk["ids"], chunk["weights"]) for chunk in chunks])


def _draw(rng: np.random.Generator, replicates: int, units: int) -> np.ndarray:
    """How often each replicate contains each unit, ``(B, U)``; rows sum to U."""
    return rng.multinomial(units, np.full(units, 1 / units), size=replicates).astype(np.float64)


def _interval(values: list[np.ndarray], level: float) -> dict[str, float]:
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(values), [tail, 1 - tail])
    return {"low": float(low), "high": float(high)}
