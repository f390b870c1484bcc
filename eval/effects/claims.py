"""The papers' headline effects as comparisons of runs; the first one of an effect is its verdict.

Effects 1 to 15 were written before any run was looked at; effects 16 to 24 on 23 November, after
results of the arms in 18 and 21 to 24 had been seen. ``recipes/studies/README.md`` lists what
changed.
"""

from eval.effects.comparisons import BALANCE, Comparison, Effect, scratch, tuned
from eval.effects.readings import (
    after,
    change,
    curve_rmse,
    determinantal_gain,
    fold_change,
    fold_mean,
    greedy_recovery,
    half_recovery,
    held_out,
    largest_gradient,
    log_change,
    log_end,
    mean_of_probes,
    recovery_gap,
    recovery_loss,
    score,
    spikes,
)

OV, OV_MEAN = "orthogonal_variance", "orthogonal_variance_mean"
RELEASED = "orthogonal_variance_released"
SP, SC, SP100, SC100 = (
    "specialization",
    "specialization_coupling",
    "specialization_x100",
    "specialization_coupling_x100",
)
METHODS = (OV, OV_MEAN, SC, SC100, "erc", "dpp")
ACTIVATIONS = ("erc_up", "erc_silu_gate", "erc_swiglu", "erc_output")

EFFECTS: tuple[Effect, ...] = (
    Effect(
        1,
        "Expert overlap falls with L_o + L_v",
        "by up to 45 %",
        [tuned("expert overlap", after("expert_overlap"), arm, -1) for arm in (OV, OV_MEAN)]
        + [tuned("cosine² of outputs", after("output_cosine"), arm, -1) for arm in (OV, OV_MEAN)]
        + [tuned("expert overlap", after("expert_overlap"), "aux_o", -1)]
        + [tuned("silhouette", after("silhouette"), arm, +1) for arm in (OV, "aux_o", "aux_v")]
        + [tuned("expert overlap", after("expert_overlap"), RELEASED, -1)],
    ),
    Effect(
        2,
        "Routing score variance rises with L_o + L_v",
        "over 150 %",
        [
            tuned("score variance", after("score_variance"), arm, +1)
            for arm in (OV, OV_MEAN, "aux_v", RELEASED)
        ],
    ),
    Effect(
        3,
        "MaxVio is unchanged by L_o + L_v",
        "RMSE of the curves <= 0.03 in section 4.3, < 8.63 in section 1",
        [tuned("MaxVio", after("max_violation"), arm, 0) for arm in (OV, OV_MEAN)]
        + [
            tuned(
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
        "The balance loss raises overlap",
        "its numbers and its words disagree",
        [
            tuned("expert overlap", after("expert_overlap"), "aux_loss", +1, baseline="none"),
            tuned("cosine² of outputs", after("output_cosine"), "aux_loss", +1, baseline="none"),
            tuned("score variance", after("score_variance"), "aux_loss", -1, baseline="none"),
        ],
    ),
    Effect(
        5,
        "R_sp falls with the specialization loss",
        "Table 1",
        [
            tuned("cosine² of activations", after("activation_cosine"), arm, -1)
            for arm in (SP, SP100)
        ],
    ),
    Effect(
        6,
        "R_sp falls further with the coupling loss",
        "Table 1",
        [
            tuned("cosine² of activations", after("activation_cosine"), arm, -1, baseline=uncoupled)
            for arm, uncoupled in ((SC, SP), (SC100, SP100))
        ],
    ),
    Effect(
        7,
        "Top-1 experts are more stable between checkpoints with the coupling loss",
        "Table 13",
        [
            tuned("same top-1 expert", mean_of_probes("stability"), SC, +1),
            tuned("same top-1 expert", mean_of_probes("stability"), SC100, +1),
            tuned("same top-1 expert", mean_of_probes("stability"), SC, +1, baseline=SP),
            tuned("same top-1 expert", mean_of_probes("stability"), SC100, +1, baseline=SP100),
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
            tuned("change of coupling mass", change("coupling_mass"), arm, +1)
            for arm in (SC, SC100)
        ],
    ),
    Effect(
        9,
        "The ERC loss reaches 0 at alpha 1, the baseline needs a larger alpha",
        "Table 2",
        [
            tuned("ERC loss at alpha 1", after("erc_loss"), "erc", -1, at_most=0.01),
            tuned("least alpha of 0 loss", after("erc_least_alpha"), "erc", -1),
        ],
    ),
    Effect(
        10,
        "The noise level epsilon rises as alpha falls",
        "Fig. 5a",
        [
            tuned("epsilon", after("noise_level"), "erc_alpha_0.4", +1, baseline="erc"),
            tuned("epsilon", after("noise_level"), "erc_alpha_0.4", +1, baseline="erc_alpha_1.5"),
            tuned("epsilon", after("noise_level"), "erc", +1, baseline="erc_alpha_1.5"),
        ],
    ),
    Effect(11, "CMR_1 and S_RL fall with SvMoE", "Tables 1, 4 and 6, Fig. 3", []),
    Effect(
        12,
        "Diverse experts have a higher effective rank, L_o the highest",
        "section 6.3, Fig. 3b: L_o highest, all three above the baseline",
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
            Comparison(
                "effective rank, end - start",
                fold_change("effective_rank"),
                "classification",
                "baseline",
                None,
                -1,
            )
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
            Comparison(
                "greedy recovery at 1/11, Gaussian weights",
                greedy_recovery(1 / 11, "gaussian"),
                "recovery",
                "sweep",
                None,
                0,
                margin=0.01,
                reference=1.0,
            ),
        ],
    ),
    Effect(
        14,
        "Held-out task score rises with the method's losses",
        "each paper's main table",
        [tuned("score, %", score(), arm, +1) for arm in METHODS],
    ),
    Effect(
        15,
        "L_o + L_v destabilizes training from scratch, specialization + coupling does not",
        "P1 Table 19",
        [
            scratch("held-out loss", held_out, OV, +1),
            scratch("held-out loss", held_out, OV_MEAN, +1),
            scratch("held-out loss", held_out, SC, 0, margin=0.01),
            scratch("largest gradient norm", largest_gradient, OV, +1),
            scratch("loss spikes", spikes, OV, +1),
            scratch("loss spikes", spikes, SC, 0),
        ],
    ),
    Effect(
        16,
        "Perplexity from scratch falls with specialization + coupling",
        "P1 section 1: by 0.7 to 1.9 % (Table 2: by 0.7 to 2.1 %)",
        [scratch("held-out loss", held_out, SC, -1)],
    ),
    Effect(
        17,
        "Specialization + coupling leave the balance loss as it is",
        "P1 Takeaway 3, Table 7: + 0.04 %",
        [
            tuned("load-balance loss", log_end("losses/load_balance"), arm, 0, margin=0.01)
            for arm in (SC, SC100)
        ]
        + [tuned("MaxVio", after("max_violation"), arm, 0) for arm in (SC, SC100)],
    ),
    Effect(
        18,
        "Routing entropy falls with specialization + coupling",
        "P1 abstract, no table",
        [tuned("entropy", after("entropy"), arm, -1) for arm in (SC, SC100)],
    ),
    Effect(
        19,
        "Without the balance loss experts are loaded unevenly, whatever else is there",
        "P0 Figure 2, Obs. 3",
        [
            tuned("MaxVio", after("max_violation"), arm, +1, baseline=balanced)
            for arm, balanced in (("none", BALANCE), ("o", "aux_o"), ("v", "aux_v"), ("o_v", OV))
        ],
    ),
    Effect(
        20,
        "L_o and L_v each move their target metric most",
        "P0 Figure 3, Obs. 5 and 6",
        [
            tuned("expert overlap", after("expert_overlap"), "aux_o", -1, baseline="aux_v"),
            tuned("expert overlap", after("expert_overlap"), OV, -1, baseline="aux_o"),
            tuned("score variance", after("score_variance"), "aux_v", +1, baseline="aux_o"),
            tuned("score variance", after("score_variance"), OV, +1, baseline="aux_v"),
        ],
    ),
    Effect(
        21,
        "The score rises with each of L_o and L_v, and without the balance loss",
        "P0 Figure 4, Obs. 8 and 9",
        [tuned("score, %", score(), arm, +1) for arm in ("aux_o", "aux_v", "none")]
        + [tuned("score, %", score(), OV, +1, baseline=arm) for arm in ("aux_o", "aux_v")],
    ),
    Effect(
        22,
        "ERC leaves the balance loss as it is",
        "P2 Fig. 3b: 1e-5 of 1e-2",
        [
            tuned("load-balance loss", log_end("losses/load_balance"), "erc", 0, margin=0.01),
            tuned("MaxVio", after("max_violation"), "erc", 0),
        ],
    ),
    Effect(
        23,
        "ERC's choices: noise, the gate, alpha 1, more than orthogonal routers",
        "P2 Figs. 5b, 6a-6c, 7",
        [
            tuned("score, %", score(), "erc", +1, baseline=other)
            for other in (
                "erc_no_noise",
                *ACTIVATIONS,
                "router_orthogonality",
                "erc_alpha_0.4",
                "erc_alpha_1.5",
            )
        ],
    ),
    Effect(
        24,
        "Accuracy rises with diverse experts",
        "P4 Fig. 3c: L_o highest, 73.6 %",
        [
            Comparison("accuracy", fold_mean("accuracy"), "classification", arm, "baseline", +1)
            for arm in ("orthogonality", "dpp", "ncl")
        ]
        + [
            Comparison(
                "nats that an expert tells of the class",
                fold_mean("class_information"),
                "classification",
                "orthogonality",
                "baseline",
                +1,
            )
        ]
        + [
            Comparison(
                "accuracy, chosen by determinant - top-k",
                determinantal_gain,
                "classification",
                arm,
                None,
                +1,
            )
            for arm in ("baseline", "dpp")
        ],
    ),
)

DIRECTIONS: tuple[Comparison, ...] = (
    *(tuned("score_variance", after("score_variance"), arm, +1) for arm in (OV, OV_MEAN)),
    *(
        tuned("output_cosine", after("output_cosine"), arm, -1)
        for arm in (OV, OV_MEAN, "dpp", "cosine_orthogonality", "ncl")
    ),
    *(
        tuned("activation_cosine", after("activation_cosine"), arm, -1)
        for arm in (SP, SC, SP100, SC100)
    ),
    *(tuned("coupling_mass", after("coupling_mass"), arm, +1) for arm in (SC, SC100)),
    tuned("erc_loss", after("erc_loss"), "erc", -1, at_most=0.01),
    tuned("router_cosine", after("router_cosine"), "router_orthogonality", -1),
    tuned("conditional_mean_rank", after("conditional_mean_rank"), "supervised_routing", -1),
    tuned("entropy", after("entropy"), "supervised_routing", -1),
    *(
        tuned("max_violation", after("max_violation"), arm, -1, baseline="none")
        for arm in ("aux_loss", "gshard", "loss_free")
    ),
)
"""Each method's target metric against ``aux_loss`` (balance methods: against ``none``)."""
