"""The claims that ``recipes/studies/demo_strength.yaml`` tests, written before its first run.

Each method runs at a third of its shares, at its shares, at three times its shares, and with its
paper's weight, and is compared with the balance loss of the same share. The first row of an ``ov``
effect is compared with the balance loss that gives about the same MaxVio.
"""

from eval.effects.comparisons import Effect, tuned
from eval.effects.readings import after, halfway, mean_of_probes

OV_ARMS = ("ov", "ov_third", "ov_triple", "ov_paper")
SC_ARMS = ("sc", "sc_third", "sc_triple", "sc_paper")
ERC_ARMS = ("erc", "erc_0.1", "erc_1")
EVEN = "balance_0.02"
"""The balance loss that gives the demo's baseline the MaxVio of its method."""

SHARES: tuple[Effect, ...] = (
    Effect(
        1,
        "Expert overlap falls with L_o + L_v, at equal MaxVio",
        "by up to 45 %",
        [tuned("expert overlap", after("expert_overlap"), "ov", -1, baseline=EVEN, at_most=0.75)]
        + [tuned("expert overlap", after("expert_overlap"), arm, -1) for arm in OV_ARMS],
    ),
    Effect(
        2,
        "Routing score variance rises with L_o + L_v, at equal MaxVio",
        "over 150 %",
        [tuned("score variance", after("score_variance"), "ov", +1, baseline=EVEN)]
        + [tuned("score variance", after("score_variance"), arm, +1) for arm in OV_ARMS],
    ),
    Effect(
        3,
        "MaxVio is that of the balance loss",
        "RMSE of the curves <= 0.03 in section 4.3, < 8.63 in section 1",
        [tuned("MaxVio", after("max_violation"), "ov", 0, baseline=EVEN, margin=0.2)]
        + [tuned("MaxVio", after("max_violation"), arm, 0, margin=0.2) for arm in OV_ARMS],
    ),
    Effect(
        0,
        "Held-out loss rises by 1 % at most",
        "ours",
        [tuned("held-out loss", after("validation_loss"), "ov", 0, baseline=EVEN, margin=0.01)]
        + [
            tuned("held-out loss", after("validation_loss"), arm, 0, margin=0.01)
            for arm in (*OV_ARMS, *SC_ARMS, *ERC_ARMS)
        ],
    ),
    Effect(
        5,
        "R_sp falls with specialization + coupling",
        "Table 1",
        [tuned("cosine² of activations", after("activation_cosine"), arm, -1) for arm in SC_ARMS],
    ),
    Effect(
        7,
        "Top-1 experts are more stable between checkpoints with the coupling loss",
        "Table 13",
        [tuned("same top-1 expert", mean_of_probes("stability"), arm, +1) for arm in SC_ARMS],
    ),
    Effect(
        8,
        "Coupling mass rises with the coupling loss",
        "Table 9",
        [tuned("coupling mass", after("coupling_mass"), arm, +1) for arm in SC_ARMS],
    ),
    Effect(
        9,
        "The ERC loss reaches 0 at alpha 1",
        "Table 2",
        [
            tuned("ERC loss at alpha 1", after("erc_loss"), arm, -1, at_most=0.01)
            for arm in ERC_ARMS
        ],
    ),
    Effect(
        14,
        "Held-out task score rises with the method's losses",
        "each paper's main table",
        [
            tuned(f"sums, %, {when}", reading("sums"), arm, +1)
            for arm in (*OV_ARMS, *SC_ARMS, *ERC_ARMS)
            for when, reading in (("120 steps", after), ("halfway", halfway))
        ]
        + [tuned("sums, %, 120 steps", after("sums"), "ov", +1, baseline=EVEN)],
    ),
    Effect(
        17,
        "Specialization + coupling leave the balance as it is",
        "P1 Takeaway 3, Table 7: + 0.04 %",
        [tuned("MaxVio", after("max_violation"), arm, 0) for arm in SC_ARMS],
    ),
    Effect(
        18,
        "Routing entropy falls with specialization + coupling",
        "P1 abstract, no table",
        [tuned("entropy", after("entropy"), arm, -1) for arm in SC_ARMS],
    ),
    Effect(
        22,
        "ERC leaves the balance as it is",
        "P2 Fig. 3b: 1e-5 of 1e-2",
        [tuned("MaxVio", after("max_violation"), arm, 0) for arm in ERC_ARMS],
    ),
)
