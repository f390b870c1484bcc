"""Judge which model a server answers with, from differences of log-probabilities.

Over all scored tokens, in nats: ``f`` is the floor, what two programs differ by for one model;
``D`` how far the trained model is from its base; ``t`` and ``b`` how far the served model is from
the trained one and from the base. Each is the mean and the 99th percentile of absolute differences,
with a 95 % interval by a bootstrap over prompts, whose draws are the same for all (paired).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Outcome = Literal[
    "cannot tell",
    "the trained model",
    "the base: the adapter is not applied",
    "the trained model, rounded",
    "another model",
    "the reference",
    "not the reference",
    "another chat template",
]
LEAST_FLOOR = 1e-4
"""Smallest floor in nats: kernels of float32 already differ by about a tenth of it."""
FLOORS = 2.0
"""A difference within this many floors is none."""
NEARER = 3.0
"""How much nearer to the trained model than to its base a rounded one must be."""
DRAWS = 1000
QUANTILE = 0.99


@dataclass(frozen=True)
class Difference:
    """Mean and 99th percentile of absolute differences in nats, each with its 95 % interval."""

    mean: float
    mean_interval: tuple[float, float]
    p99: float
    p99_interval: tuple[float, float]

    def above(self, floor: Floor) -> bool:
        """Whether mean and percentile are certainly more than :data:`FLOORS` floors."""
        mean, p99 = self.mean_interval[0], self.p99_interval[0]
        return mean > FLOORS * floor.mean and p99 > FLOORS * floor.p99

    def within(self, floor: Floor) -> bool:
        """Whether mean and percentile are certainly at most :data:`FLOORS` floors."""
        mean, p99 = self.mean_interval[1], self.p99_interval[1]
        return mean <= FLOORS * floor.mean and p99 <= FLOORS * floor.p99

    def text(self) -> str:
        """Both numbers with their intervals."""
        (low, high), (low99, high99) = self.mean_interval, self.p99_interval
        return (
            f"mean {self.mean:.2e} [{low:.1e}, {high:.1e}], "
            f"99th percentile {self.p99:.2e} [{low99:.1e}, {high99:.1e}]"
        )


@dataclass(frozen=True)
class Floor:
    """What two programs differ by for one model, in nats; ``measured``, or estimated."""

    mean: float
    p99: float
    measured: bool

    def text(self) -> str:
        """Both numbers, and where they are from."""
        how = "measured" if self.measured else "estimated"
        return f"mean {self.mean:.2e}, 99th percentile {self.p99:.2e} ({how})"


def floor_of(differences: Sequence[np.ndarray], measured: bool) -> Floor:
    """The floor from absolute differences by prompt.

    ``measured``: of the served base to the base. Otherwise of the reference in the server's dtype
    to itself in float32, which is doubled, since a server's kernels differ, too.
    """
    values = np.concatenate(list(differences))
    factor = 1.0 if measured else 2.0
    numbers = factor * values.mean(), factor * np.quantile(values, QUANTILE, method="inverted_cdf")
    mean, p99 = (max(LEAST_FLOOR, float(value)) for value in numbers)
    return Floor(mean, p99, measured)


def spread(differences: Sequence[np.ndarray], seed: int = 0) -> Difference:
    """Mean, percentile and intervals of absolute ``differences``, one array a prompt.

    Calls with the same ``seed`` and number of prompts draw the same prompts.
    """
    values_N = np.concatenate(list(differences))
    prompts = len(differences)
    prompt_N = np.repeat(np.arange(prompts), [len(part) for part in differences])
    draws = np.random.default_rng(seed).integers(prompts, size=(DRAWS, prompts))
    # How often each draw has each prompt: a token's weight, so that no draw is laid out in memory.
    times_RP = np.stack([np.bincount(draw, minlength=prompts) for draw in draws])
    order_N = np.argsort(values_N)
    weights_RN = times_RP[:, prompt_N[order_N]]
    totals_R = weights_RN.sum(1)
    means_R = weights_RN @ values_N[order_N] / totals_R
    reached_RN = weights_RN.cumsum(1) >= QUANTILE * totals_R[:, None]
    p99_R = values_N[order_N][reached_RN.argmax(1)]
    return Difference(
        float(values_N.mean()),
        _interval(means_R),
        float(np.quantile(values_N, QUANTILE, method="inverted_cdf")),
        _interval(p99_R),
    )


def _interval(draws_R: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws_R, [0.025, 0.975])
    return float(low), float(high)


def judge(
    floor: Floor, moved: Difference | None, tuned: Difference, base: Difference | None
) -> Outcome:
    """The verdict from ``f``, ``D``, ``t`` and ``b``; without a base only whether it is equal."""
    if moved is None or base is None:
        return "the reference" if tuned.within(floor) else "not the reference"
    if not moved.above(floor):
        return "cannot tell"
    if tuned.within(floor):
        return "the trained model"
    if base.within(floor):
        return "the base: the adapter is not applied"
    if NEARER * tuned.mean < base.mean and NEARER * tuned.p99 < base.p99:
        return "the trained model, rounded"
    return "another model"
