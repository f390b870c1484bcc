"""The fifteen headline effects as comparisons of runs; the first of an effect is its verdict's.

A reading maps a run's result to a number. What a claim compares, which way, and with what margin
is written here before any run is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from moe_finetune.studies.effects.shards import Part

Result = Mapping[str, Any]
Reading = Callable[[Result], float | None]


@dataclass(frozen=True)
class Comparison:
    """One row of the table.

    Attributes:
        what: the quantity.
        reading: of a run's result; None where the run has no such number.
        part, arm: the runs.
        baseline: arm that is subtracted, seed by seed; None compares with ``reference``.
        sign: +1 or -1, the claimed sign of the difference; 0: no change within ``margin``.
        margin: for sign 0, as a share of the baseline's mean.
        reference: subtracted where there is no baseline arm.
        at_most: the claim is met only if the arm's mean is at most this share of the baseline's.
        pair: reading of both runs at once, in the place of the difference.
    """

    what: str
    reading: Reading
    part: Part
    arm: str
    baseline: str | None
    sign: Literal[-1, 0, 1]
    margin: float = 0.1
    reference: float = 0.0
    at_most: float | None = None
    pair: Callable[[Result, Result], float] | None = None


@dataclass(frozen=True)
class Effect:
    """One headline effect: what the paper reports, and the comparisons that test it."""

    number: int
    name: str
    paper: str
    comparisons: Sequence[Comparison]


def after(name: str) -> Reading:
    """Metric ``name`` of the last probe."""
    return lambda result: result["probes"][-1].get(name)


def change(name: str) -> Reading:
    """Last probe's metric minus the first's."""
    return lambda result: result["probes"][-1][name] - result["probes"][0][name]


def mean_of_probes(name: str) -> Reading:
    """Mean over the probes that have the metric."""
    return lambda result: float(np.mean([row[name] for row in result["probes"] if name in row]))


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


def curve_rmse(name: str) -> Callable[[Result, Result], float]:
    """Root mean squared difference of a logged curve in two runs (P0 eq. 43)."""
    from moe_finetune.metrics import rmse

    return lambda a, b: rmse(logged(name)(a), logged(name)(b))


def score(task: str = "mean") -> Reading:
    """Held-out score after training, in percent."""
    return lambda result: 100 * result["scores"][task]


def fold_mean(name: str) -> Reading:
    """Mean over the folds."""
    return lambda result: float(np.mean(result[name]))


def recovered(choice: str, at: float) -> Reading:
    """Share of trials that ``choice`` recovers at the coherence nearest to ``at``."""

    def read(result: Result) -> float:
        row = min(result["random"], key=lambda row: abs(row["coherence"] - at))
        return row[choice]

    return read


def half_recovery(result: Result) -> float:
    """Coherence at which greedy recovery falls to one half, between the two nearest levels."""
    rows = result["random"]
    for low, high in pairwise(rows):
        if low["greedy"] >= 0.5 > high["greedy"]:
            share = (low["greedy"] - 0.5) / (low["greedy"] - high["greedy"])
            return low["coherence"] + share * (high["coherence"] - low["coherence"])
    return rows[-1]["coherence"]


def held_out(result: Result) -> float | None:
    """Held-out loss of a run from scratch; None when it diverged."""
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


def _tuned(
    what: str,
    reading: Reading,
    arm: str,
    sign: Literal[-1, 0, 1],
    baseline: str = "aux_loss",
    **more: Any,
) -> Comparison:
    return Comparison(what, reading, "finetune", arm, baseline, sign, **more)


def _scratch(
    what: str, reading: Reading, arm: str, sign: Literal[-1, 0, 1], **more: Any
) -> Comparison:
    return Comparison(what, reading, "scratch", arm, "aux_loss", sign, **more)


OV, OV_SUM = "orthogonal_variance", "orthogonal_variance_sum"
SP, SC, SP100, SC100 = (
    "specialization",
    "specialization_coupling",
    "specialization_x100",
    "specialization_coupling_x100",
)
METHODS = (OV, OV_SUM, SC, SC100, "erc", "dpp")

EFFECTS: tuple[Effect, ...] = (
    Effect(
        1,
        "Expert overlap falls with L_o + L_v",
        "by up to 45 %",
        [_tuned("expert overlap", after("expert_overlap"), arm, -1) for arm in (OV, OV_SUM)]
        + [_tuned("cosine² of outputs", after("output_cosine"), arm, -1) for arm in (OV, OV_SUM)],
    ),
    Effect(
        2,
        "Routing score variance rises with L_o + L_v",
        "over 150 %",
        [_tuned("score variance", after("score_variance"), arm, +1) for arm in (OV, OV_SUM)],
    ),
    Effect(
        3,
        "MaxVio is unchanged against the balance loss alone",
        "RMSE of the curves <= 0.03 in the text, < 8.63 in the abstract",
        [_tuned("MaxVio", after("max_violation"), arm, 0) for arm in (OV, OV_SUM)]
        + [
            _tuned(
                "RMSE of training MaxVio - 0.03",
                after("max_violation"),
                arm,
                -1,
                pair=curve_rmse("routing/max_violation"),
                reference=0.03,
            )
            for arm in (OV, OV_SUM)
        ],
    ),
    Effect(
        4,
        "The balance loss alone raises overlap",
        "its numbers and its words disagree",
        [
            _tuned("expert overlap", after("expert_overlap"), "aux_loss", +1, baseline="none"),
            _tuned("cosine² of outputs", after("output_cosine"), "aux_loss", +1, baseline="none"),
        ],
    ),
    Effect(
        5,
        "R_sp falls with the specialization loss",
        "Table 1",
        [
            _tuned("cosine² of activations", after("activation_cosine"), arm, -1)
            for arm in (SP, SP100)
        ],
    ),
    Effect(
        6,
        "R_sp falls further with the coupling loss",
        "Table 1",
        [
            _tuned("cosine² of activations", after("activation_cosine"), arm, -1, baseline=alone)
            for arm, alone in ((SC, SP), (SC100, SP100))
        ],
    ),
    Effect(
        7,
        "Top-1 experts are more stable between checkpoints with the coupling loss",
        "Table 13",
        [
            _tuned("same top-1 expert", mean_of_probes("stability"), SC, +1),
            _tuned("same top-1 expert", mean_of_probes("stability"), SC100, +1),
            _tuned("same top-1 expert", mean_of_probes("stability"), SC, +1, baseline=SP),
            _tuned("same top-1 expert", mean_of_probes("stability"), SC100, +1, baseline=SP100),
        ],
    ),
    Effect(
        8,
        "R_cp falls steadily in training",
        "Table 9",
        [
            Comparison(
                "change of R_cp over training",
                log_change("losses/coupling"),
                "finetune",
                arm,
                None,
                -1,
            )
            for arm in (SC, SC100)
        ]
        + [
            _tuned("change of coupling mass", change("coupling_mass"), arm, +1)
            for arm in (SC, SC100)
        ],
    ),
    Effect(
        9,
        "The ERC loss reaches 0 at alpha 1, the baseline needs a larger alpha",
        "Table 2",
        [
            _tuned("ERC loss at alpha 1", after("erc_loss"), "erc", -1, at_most=0.01),
            _tuned("least alpha of 0 loss", after("erc_least_alpha"), "erc", -1),
        ],
    ),
    Effect(
        10,
        "The noise level epsilon rises as alpha falls",
        "Fig. 5a",
        [
            _tuned("epsilon", after("noise_level"), "erc_alpha_0.4", +1, baseline="erc"),
            _tuned("epsilon", after("noise_level"), "erc_alpha_0.4", +1, baseline="erc_alpha_3"),
            _tuned("epsilon", after("noise_level"), "erc", +1, baseline="erc_alpha_3"),
        ],
    ),
    Effect(11, "CMR_1 and S_RL fall with SvMoE", "Tables 1, 2 and Fig. 3", []),
    Effect(
        12,
        "Diverse experts have a higher effective rank, L_o the highest",
        "Fig. 3b: L_o highest, all three above the baseline",
        [
            Comparison(
                "effective rank", fold_mean("effective_rank"), "classification", arm, base, +1
            )
            for arm, base in (
                ("orthogonality", "baseline"),
                ("dpp", "baseline"),
                ("ncl", "baseline"),
                ("orthogonality", "dpp"),
                ("orthogonality", "ncl"),
            )
        ]
        + [
            Comparison("accuracy", fold_mean("accuracy"), "classification", arm, "baseline", +1)
            for arm in ("orthogonality", "dpp", "ncl")
        ],
    ),
    Effect(
        13,
        "Greedy recovery collapses with coherence, but far beyond the barrier",
        "Fig. 2: k = 6, barrier 1/11",
        [
            Comparison(
                "greedy recovery at 0.9 - at 0.02",
                lambda r: recovered("greedy", 0.9)(r) - recovered("greedy", 0.02)(r),  # type: ignore[operator]
                "recovery",
                "sweep",
                None,
                -1,
            ),
            Comparison(
                "greedy - optimal recovery at 0.9",
                lambda r: recovered("greedy", 0.9)(r) - recovered("optimal", 0.9)(r),  # type: ignore[operator]
                "recovery",
                "sweep",
                None,
                -1,
            ),
            Comparison(
                "coherence of half recovery - 1/11",
                half_recovery,
                "recovery",
                "sweep",
                None,
                +1,
                reference=1 / 11,
            ),
        ],
    ),
    Effect(
        14,
        "Held-out task score rises against the balance loss alone",
        "each paper's main table",
        [_tuned("score, %", score(), arm, +1) for arm in METHODS],
    ),
    Effect(
        15,
        "L_o + L_v destabilises training from scratch, specialization + coupling does not",
        "P1 Table 19",
        [
            _scratch("held-out loss", held_out, OV, +1),
            _scratch("held-out loss", held_out, OV_SUM, +1),
            _scratch("held-out loss", held_out, SC, 0, margin=0.01),
            _scratch("largest gradient norm", largest_gradient, OV_SUM, +1),
            _scratch("loss spikes", spikes, OV_SUM, +1),
            _scratch("loss spikes", spikes, SC, 0),
        ],
    ),
)

DIRECTIONS: tuple[Comparison, ...] = (
    *(_tuned("score_variance", after("score_variance"), arm, +1) for arm in (OV, OV_SUM)),
    *(
        _tuned("output_cosine", after("output_cosine"), arm, -1)
        for arm in (OV, OV_SUM, "dpp", "cosine_orthogonality", "ncl")
    ),
    *(
        _tuned("activation_cosine", after("activation_cosine"), arm, -1)
        for arm in (SP, SC, SP100, SC100)
    ),
    *(_tuned("coupling_mass", after("coupling_mass"), arm, +1) for arm in (SC, SC100)),
    _tuned("erc_loss", after("erc_loss"), "erc", -1, at_most=0.01),
    _tuned("router_cosine", after("router_cosine"), "router_orthogonality", -1),
    _tuned("conditional_mean_rank", after("conditional_mean_rank"), "supervised_routing", -1),
    _tuned("entropy", after("entropy"), "supervised_routing", -1),
    *(
        _tuned("max_violation", after("max_violation"), arm, -1, baseline="none")
        for arm in ("aux_loss", "gshard", "loss_free")
    ),
)
"""Each method's own metric against ``aux_loss`` (balance methods: against ``none``)."""
