"""The papers' methods as data: loss terms, routing noise and bias update by preset name."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.registry import Registry


@dataclass(frozen=True)
class Paper:
    """A method's paper: as pages cite it, in full, and its number on arXiv, or None."""

    short: str
    title: str
    arxiv: str | None


PAPERS = {
    "P0": Paper(
        "Advancing Expert Specialization",
        "Advancing Expert Specialization for Better MoE",
        "2505.22323",
    ),
    "P1": Paper(
        "Regularization Losses",
        "Synergistic Intra- and Cross-Layer Regularization Losses for MoE Expert Specialization",
        "2602.14159",
    ),
    "P2": Paper(
        "Coupling Experts and Routers",
        "Coupling Experts and Routers in Mixture-of-Experts via an Auxiliary Loss",
        "2512.23447",
    ),
    "P3": Paper("Supervised Routing", "Supervised Routing for MoE", None),
    "P4": Paper(
        "Variational Inference",
        "Variational Inference, Entropy, and Orthogonality: A Unified Theory of Mixture-of-Experts",
        "2601.03577",
    ),
}
"""The papers by the names that :attr:`Preset.source` begins with."""


@dataclass(frozen=True)
class Preset:
    """One method.

    Attributes:
        name: the preset's name in a recipe.
        terms: options of each loss term, by its name.
        source: paper and section.
        shows: the expected effect compared with ``aux_loss`` or ``none``.
        goal: the routing metric, or logged ``losses/<term>``, that training should raise (+1) or
            lower (-1); None for a method without one.
        recommended: options of its terms for ``share: recommended``, or None.
        perturbations: ``jitter``, ``expert_dropout``, ``random_second_choice``.
        bias_update: step of the loss-free bias, or None.
        router_gradient: "dense" if the weights of unselected experts learn, too.
    """

    name: str
    terms: Mapping[str, Mapping[str, Any]]
    source: str
    shows: str
    goal: tuple[str, int] | None = None
    recommended: Mapping[str, Mapping[str, Any]] | None = None
    perturbations: Mapping[str, Any] = field(default_factory=dict)
    bias_update: float | None = None
    router_gradient: str = "selected"

    @property
    def paper(self) -> Paper | None:
        """The paper that the method is from; None for one of nobody's in particular."""
        return PAPERS.get(self.source.split()[0])

    def method(self) -> dict[str, Any]:
        """The preset as a recipe's ``method:`` mapping; a copy that may be modified."""
        method: dict[str, Any] = {"terms": copy.deepcopy(dict(self.terms))}
        if self.perturbations:
            method["perturbations"] = dict(self.perturbations)
        if self.bias_update is not None:
            method["bias_update"] = self.bias_update
        if self.router_gradient != "selected":
            method["router_gradient"] = self.router_gradient
        return method


def _balance(weight: float, variant: str, scope: str, **options: Any) -> dict[str, Any]:
    return {"weight": weight, "variant": variant, "scope": scope, **options}


_P0_SUM = 1e-3 * 16_384
"""P0's weight on a sum over its batch: 32 sequences of 512 tokens, a length that is our assumption
(the paper gives none)."""

_DEEPSEEK = _balance(1e-3, "deepseek", "sequence")
_PER_LAYER = _balance(1e-2, "deepseek", "micro_batch", layers_reduction="mean")
_SYNTHETIC = _balance(1e-2, "switch", "micro_batch")
_COUPLED = {
    "load_balance": _balance(1e-3, "deepseek", "micro_batch"),
    "specialization": {"weight": 2e-4},
    "coupling": {"weight": 1e-4},
}
_COUPLED_SCRATCH = {
    "load_balance": _balance(1e-2, "deepseek", "micro_batch"),
    "specialization": {"weight": 2e-3},
    "coupling": {"weight": 1e-3},
}
_Z = {"z_loss": {"weight": 1e-3}}

_ALL = (
    Preset(
        "none",
        terms={},
        source="-",
        shows="plain fine-tuning: the loss and routing that all others are compared with",
    ),
    Preset(
        "aux_loss",
        terms={"load_balance": _DEEPSEEK},
        source='P0 "With Aux Loss"; DeepSeek-V2 eq. 23',
        shows="MaxVio below none",
        goal=("max_violation", -1),
        recommended={"load_balance": {"share": 0.5, "scope": "micro_batch"}},
    ),
    Preset(
        "gshard",
        terms={"load_balance": _balance(1e-3, "gshard", "micro_batch")},
        perturbations={"random_second_choice": True},
        source="GShard (Lepikhin et al. 2020)",
        shows="MaxVio below none",
        goal=("max_violation", -1),
    ),
    Preset(
        "st_moe",
        terms={"load_balance": _balance(1e-2, "switch", "micro_batch"), **_Z},
        perturbations={"jitter": 0.01, "expert_dropout": 0.4},
        source="ST-MoE (Zoph et al. 2022)",
        shows="MaxVio and router logits below none",
        goal=("max_violation", -1),
    ),
    Preset(
        "loss_free",
        terms={},
        bias_update=1e-3,
        source="loss-free balancing; DeepSeek-V3",
        shows="MaxVio below none without a balance gradient",
        goal=("max_violation", -1),
    ),
    Preset(
        "densemixer",
        terms={},
        router_gradient="dense",
        source="DenseMixer (Yao et al. 2025)",
        shows="routers learn from all experts; the forward is none's",
    ),
    Preset(
        "orthogonal_variance",
        terms={
            "load_balance": _DEEPSEEK,
            "orthogonality": {"weight": _P0_SUM, "form": "projection"},
            "variance": {"weight": _P0_SUM},
        },
        source="P0 eq. 7, 25, summed over tokens as printed; balance: eq. 18 / K",
        shows="score variance above, output cosine and expert overlap below aux_loss; MaxVio rises",
        goal=("score_variance", 1),
        recommended={
            "load_balance": {"share": 0.5, "scope": "micro_batch"},
            "orthogonality": {"share": 0.02},
            "variance": {"share": 0.7},
        },
    ),
    Preset(
        "orthogonal_variance_mean",
        terms={
            "load_balance": _DEEPSEEK,
            "orthogonality": {"weight": 1e-3, "form": "projection"},
            "variance": {"weight": 1e-3},
        },
        source="P0 eq. 7, 25, its weights on the mean over tokens; balance: eq. 18 / K",
        shows="as orthogonal_variance, some thousand times weaker",
        goal=("score_variance", 1),
    ),
    Preset(
        "specialization_coupling",
        terms=_COUPLED,
        source="P1 eq. 4, 6, Table 14 (fine-tuning)",
        shows="activation cosine below and coupling mass above aux_loss",
        goal=("activation_cosine", -1),
        recommended={
            "load_balance": {"share": 0.3},
            "specialization": {"share": 0.7},
            "coupling": {"share": 0.25},
        },
    ),
    Preset(
        "specialization_coupling_z",
        terms={**_COUPLED, **_Z},
        source="P1 Table 14, with the z-loss of B.1",
        shows="as specialization_coupling, with smaller router logits",
        goal=("activation_cosine", -1),
    ),
    Preset(
        "specialization_coupling_scratch",
        terms=_COUPLED_SCRATCH,
        source="P1 eq. 4, 6, B.1 (from scratch)",
        shows="as specialization_coupling, when training from scratch",
        goal=("activation_cosine", -1),
    ),
    Preset(
        "specialization_coupling_scratch_z",
        terms={**_COUPLED_SCRATCH, **_Z},
        source="P1 B.1 (from scratch), with z-loss",
        shows="as specialization_coupling_scratch, with smaller router logits",
        goal=("activation_cosine", -1),
    ),
    Preset(
        "erc",
        terms={"load_balance": _PER_LAYER, "erc": {"weight": 1.0, "alpha": 1.0}},
        source="P2 eq. 3, 4, §4.1; balance averaged over layers as in OLMoE",
        shows="ERC table down to 0 at alpha 1 in the trained layers",
        goal=("losses/erc", -1),
        recommended={"load_balance": {"share": 0.1}, "erc": {"share": 0.3}},
    ),
    Preset(
        "router_orthogonality",
        terms={"load_balance": _PER_LAYER, "router_orthogonality": {"weight": 1e-2}},
        source="P2 §4.5 (ERNIE); the weight is ours",
        shows="cosine of router rows below aux_loss",
        goal=("router_cosine", -1),
    ),
    Preset(
        "dpp",
        terms={"load_balance": _SYNTHETIC, "dpp": {"weight": 0.1}},
        source="P4 algorithm 2, Table 2",
        shows="output cosine below aux_loss",
        goal=("output_cosine", -1),
    ),
    Preset(
        "ncl",
        terms={"load_balance": _SYNTHETIC, "ncl": {"weight": 0.1}},
        source="P4 algorithm 3 without its label term, Table 2",
        shows="spread of outputs above aux_loss",
        goal=("losses/ncl", -1),
    ),
    Preset(
        "cosine_orthogonality",
        terms={
            "load_balance": _SYNTHETIC,
            "orthogonality": {"weight": 0.1, "form": "cosine"},
        },
        source="P4 §6.2, Table 2",
        shows="output cosine below aux_loss",
        goal=("output_cosine", -1),
    ),
    Preset(
        "supervised_routing",
        terms={"supervised_routing": {"weight": 1.0}},
        source="P3 §3.2 (router stage); needs `terms.supervised_routing.table`",
        shows="conditional mean rank and router entropy below none",
        goal=("entropy", -1),
    ),
    Preset(
        "supervised_routing_baseline",
        terms={"load_balance": _balance(1e-2, "gshard", "micro_batch", probabilities="topk")},
        source="P3 appendix B",
        shows="the balance loss that supervised routing is compared with",
        goal=("max_violation", -1),
    ),
)

PRESETS: Registry[Preset] = Registry("preset", RecipeError)
for _preset in _ALL:
    PRESETS.register(_preset.name, _preset)
