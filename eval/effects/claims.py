"""The fifteen headline effects as comparisons of runs; the first of an effect is its verdict's.

What a claim compares, which way, and with what margin was written before any run was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval.effects.readings import (
    Reading,
    Result,
    after,
    change,
    curve_rmse,
    fold_mean,
    half_recovery,
    held_out,
    largest_gradient,
    log_change,
    mean_of_probes,
    recovery_gap,
    recovery_loss,
    score,
    spikes,
)
from eval.effects.shards import Part


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


OV, OV_MEAN = "orthogonal_variance", "orthogonal_variance_mean"
SP, SC, SP100, SC100 = (
    "specialization",
    "specialization_coupling",
    "specialization_x100",
    "specialization_coupling_x100",
)
METHODS = (OV, OV_MEAN, SC, SC100, "erc", "dpp")

EFFECTS: tuple[Effect, ...] = (
    Effect(
        1,
        "Expert overlap falls with L_o + L_v",
        "by up to 45 %",
        [_tuned("expert overlap", after("expert_overlap"), arm, -1) for arm in (OV, OV_MEAN)]
        + [_tuned("cosine² of outputs", after("output_cosine"), arm, -1) for arm in (OV, OV_MEAN)]
        + [_tuned("expert overlap", after("expert_overlap"), "aux_o", -1)],
    ),
    Effect(
        2,
        "Routing score variance rises with L_o + L_v",
        "over 150 %",
        [
            _tuned("score variance", after("score_variance"), arm, +1)
            for arm in (OV, OV_MEAN, "aux_v")
        ],
    ),
    Effect(
        3,
        "MaxVio is unchanged against the balance loss alone",
        "RMSE of the curves <= 0.03 in the text, < 8.63 in the abstract",
        [_tuned("MaxVio", after("max_violation"), arm, 0) for arm in (OV, OV_MEAN)]
        + [
            _tuned(
                "RMSE of training MaxVio - 0.03",
                after("max_violation"),
                arm,
                -1,
                pair=curve_rmse("routing/max_violation"),
                reference=0.03,
            )
            for arm in (OV, OV_MEAN)
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
            _tuned("epsilon", after("noise_level"), "erc_alpha_0.4", +1, baseline="erc_alpha_1.5"),
            _tuned("epsilon", after("noise_level"), "erc", +1, baseline="erc_alpha_1.5"),
        ],
    ),
    Effect(11, "CMR_1 and S_RL fall with SvMoE", "Tables 1, 4 and 6, Fig. 3", []),
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
                recovery_loss(0.02, 0.9),
                "recovery",
                "sweep",
                None,
                -1,
            ),
            Comparison(
                "greedy - optimal recovery at 0.9",
                recovery_gap(0.9),
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
            _scratch("held-out loss", held_out, OV_MEAN, +1),
            _scratch("held-out loss", held_out, SC, 0, margin=0.01),
            _scratch("largest gradient norm", largest_gradient, OV, +1),
            _scratch("loss spikes", spikes, OV, +1),
            _scratch("loss spikes", spikes, SC, 0),
        ],
    ),
)

DIRECTIONS: tuple[Comparison, ...] = (
    *(_tuned("score_variance", after("score_variance"), arm, +1) for arm in (OV, OV_MEAN)),
    *(
        _tuned("output_cosine", after("output_cosine"), arm, -1)
        for arm in (OV, OV_MEAN, "dpp", "cosine_orthogonality", "ncl")
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
