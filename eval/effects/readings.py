"""Functions from a run's result to a number, for the comparisons of the effects."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

Result = Mapping[str, Any]
Reading = Callable[[Result], float | None]
"""From a run's result to a number; None if the run has no such number."""


def after(name: str) -> Reading:
    """Metric ``name`` of the last probe."""
    return lambda result: result["probes"][-1].get(name)


def change(name: str) -> Reading:
    """Last probe's metric minus the first's."""
    return lambda result: result["probes"][-1][name] - result["probes"][0][name]


def mean_of_probes(name: str) -> Reading:
    """Mean over the probes that have the metric."""
    return lambda result: float(np.mean([row[name] for row in result["probes"] if name in row]))


def halfway(name: str) -> Reading:
    """Metric ``name`` of the probe in the middle of training."""
    return lambda result: result["probes"][len(result["probes"]) // 2].get(name)


def logged(name: str) -> Callable[[Result], list[float]]:
    """A logged value over training."""
    return lambda result: [row[name] for row in result["log"] if name in row]


def log_change(name: str) -> Reading:
    """Mean of a logged value in the run's last quarter minus that in its first."""

    def read(result: Result) -> float | None:
        values = logged(name)(result)
        quarter = max(1, len(values) // 4)
        if len(values) < 2:
            return None
        return float(np.mean(values[-quarter:]) - np.mean(values[:quarter]))

    return read


def log_end(name: str) -> Reading:
    """Mean of a logged value over the run's last quarter."""

    def read(result: Result) -> float | None:
        values = logged(name)(result)
        return float(np.mean(values[-max(1, len(values) // 4) :])) if values else None

    return read


def curve_rmse(name: str) -> Callable[[Result, Result], float]:
    """Root mean squared difference of a logged curve in two runs (P0 eq. 43)."""
    from moe_finetune.metrics import rmse

    return lambda a, b: rmse(logged(name)(a), logged(name)(b))


def score(task: str = "mean") -> Reading:
    """Held-out score after training, in percent."""
    return lambda result: 100 * result["scores"][task]


def fold_mean(name: str) -> Reading:
    """Mean over the folds."""
    return lambda result: float(np.mean(result[name])) if name in result else None


def fold_change(name: str) -> Reading:
    """Mean over the folds after the last epoch, minus that before training."""

    def read(result: Result) -> float | None:
        curve = result.get("curves", {}).get(name)
        return float(np.mean(curve[-1]) - np.mean(curve[0])) if curve else None

    return read


def determinantal_gain(result: Result) -> float | None:
    """Accuracy with theorem 6.3's choice of experts minus accuracy with top-k, mean over folds."""
    name = "determinantal_accuracy"
    return float(np.mean(result[name]) - np.mean(result["accuracy"])) if name in result else None


def recovered(result: Result, choice: str, at: float, features: str = "random") -> float:
    """Share of trials that ``choice`` recovers, at the coherence nearest to ``at``."""
    row = min(result[features], key=lambda row: abs(row["coherence"] - at))
    return float(row[choice])


def greedy_recovery(at: float, features: str) -> Reading:
    """Share of trials that the greedy choice recovers at one coherence."""
    return lambda result: recovered(result, "greedy", at, features) if features in result else None


def recovery_loss(low: float, high: float) -> Reading:
    """Greedy recovery at coherence ``high`` minus greedy recovery at ``low``."""
    return lambda result: recovered(result, "greedy", high) - recovered(result, "greedy", low)


def recovery_gap(at: float) -> Reading:
    """Greedy minus optimal recovery at one coherence."""
    return lambda result: recovered(result, "greedy", at) - recovered(result, "optimal", at)


def half_recovery(result: Result) -> float:
    """Coherence at which greedy recovery falls to one half, interpolated between levels."""
    rows = result["random"]
    for low, high in pairwise(rows):
        if low["greedy"] >= 0.5 > high["greedy"]:
            share = (low["greedy"] - 0.5) / (low["greedy"] - high["greedy"])
            return low["coherence"] + share * (high["coherence"] - low["coherence"])
    return rows[-1]["coherence"]


def held_out(result: Result) -> float | None:
    """Held-out loss of a run from scratch; None if it diverged."""
    return result["held_out"]


def spikes(result: Result) -> float:
    """Steps after the warm-up's end whose loss is 0.1 nats above the mean of the five before."""
    loss = np.asarray(result["loss"])
    start = max(6, len(loss) // 10)
    return float(sum(loss[i] > loss[i - 5 : i].mean() + 0.1 for i in range(start, len(loss))))


def largest_gradient(result: Result) -> float:
    """Largest gradient norm after the first tenth of the steps, before clipping."""
    norms = result["gradient_norm"]
    return float(max(norms[max(1, len(norms) // 10) :]))
