"""What the toolkit knows about a model family: facts, declared once, never guessed from shapes.

Shape legend: L decoder layers, E routed experts, K selected per token, H hidden, D expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.registry import Registry


@dataclass(frozen=True)
class DiskLayout:
    """Tensor names of one MoE layer in the published checkpoint, with ``{layer}``/``{expert}``.

    Most families store one matrix per expert and projection; in memory transformers fuses them to
    ``gate_up_proj (E, 2D, H)``, gate rows first, and ``down_proj (E, H, D)``. Where ``gate_up`` is
    given the files hold these two stacks themselves, under the names ``gate_up`` and ``down``,
    ``transposed`` where the class stores (E, in, out).

    ``per_expert`` are further tensors of the block with one row an expert.
    """

    block: str = "model.layers.{layer}.mlp"
    router: str = "gate.weight"
    router_bias: str | None = None
    gate: str = "experts.{expert}.gate_proj.weight"
    up: str = "experts.{expert}.up_proj.weight"
    down: str = "experts.{expert}.down_proj.weight"

    gate_up: str | None = None
    transposed: bool = False
    per_expert: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether a tensor of the files holds all experts."""
        return self.gate_up is not None

    def parts(self, parameter: str) -> tuple[str, ...]:
        """What the loaded model's ``gate_up_proj`` or ``down_proj`` is in the files."""
        if parameter == "down_proj":
            return ("down",)
        return ("gate_up",) if self.fused else ("gate", "up")

    def name(self, part: str, layer: int, expert: int | None = None) -> str:
        """Full name of ``part``, one of this class's patterns."""
        pattern = getattr(self, part)
        if pattern is None:
            raise KeyError(f"this layout has no {part}")
        return f"{self.block}.{pattern}".format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Family:
    """Facts of one model family.

    ``score`` is the function from router logits to probabilities. ``renormalize`` and ``scaling``
    say what the family does to the selected scores before they weight the experts. Module paths
    are relative to a decoder layer of the loaded transformers model: ``attention_targets`` and
    ``shared_targets`` too, which name linear layers, of which a layer may lack some. ``groups`` is
    the number of groups of experts and how many of them a token may select from.
    ``router_weight`` is where the weight is in the router's module, ``router_returns`` the order in
    which that module returns what it computes.
    """

    name: str
    model_type: str
    architecture: str
    title: str
    score: Literal["softmax", "sigmoid"]
    attention_targets: tuple[str, ...]
    shared_targets: tuple[str, ...] = ()
    disk: DiskLayout = field(default_factory=DiskLayout)
    block_path: str = "mlp"
    router_name: str = "gate"
    router_weight: str = "weight"
    router_returns: tuple[str, str, str] = ("logits", "weights", "index")
    experts_name: str = "experts"
    num_experts: Callable[[Any], int] = lambda config: config.num_experts
    renormalize: Callable[[Any], bool] = lambda config: bool(config.norm_topk_prob)
    scaling: Callable[[Any], float] = lambda config: 1.0
    groups: Callable[[Any], tuple[int, int]] = lambda config: (1, 1)
    top_k: Callable[[Any], int] = lambda config: int(config.num_experts_per_tok)
    moe_layers: Callable[[Any], list[int]] = lambda config: list(range(config.num_hidden_layers))
    expert_width: Callable[[Any], int] = lambda config: config.moe_intermediate_size
    check: Callable[[Any], None] = lambda config: None
    bias_export: Literal["tensor", "noaux_tc", "none"] = "none"

    @property
    def expert_targets(self) -> tuple[str, str]:
        """PEFT ``target_parameters`` of the routed experts."""
        return tuple(f"{self.block_path}.{self.experts_name}.{p}" for p in FUSED)  # type: ignore[return-value]

    @property
    def router_target(self) -> str:
        """PEFT ``target_parameters`` entry of the router's weight."""
        return f"{self.block_path}.{self.router_name}.{self.router_weight}"


FUSED = ("gate_up_proj", "down_proj")
FAMILIES: Registry[Family] = Registry("family", UnsupportedModelError)


def after_dense_layers(config: Any) -> list[int]:
    """MoE layers of a DeepSeek-style config: all but the first ``first_k_dense_replace``."""
    return list(range(config.first_k_dense_replace, config.num_hidden_layers))


def expert_groups(config: Any) -> tuple[int, int]:
    """DeepSeek's groups: ``n_group`` and ``topk_group``."""
    return int(config.n_group or 1), int(config.topk_group or 1)


def under(module: str, *names: str) -> tuple[str, ...]:
    """Paths of ``names`` in ``module``."""
    return tuple(f"{module}.{name}" for name in names)


QKVO = under("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLA = under(
    "self_attn", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
)
"""DeepSeek's latent attention; ``q_proj`` where queries are not compressed."""

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
SHARED_EXPERTS = under("mlp.shared_experts", *GATED_MLP)
SHARED_EXPERT = under("mlp.shared_expert", *GATED_MLP)


def require(config: Any, **wanted: Any) -> None:
    """Raise UnsupportedModelError where a field that ``config`` has is not one of those wanted.

    For options of the public config that transformers' class ignores and vLLM's does not.
    """
    for key, allowed in wanted.items():
        value = getattr(config, key, None)
        if value is not None and value not in allowed:
            supported = ", ".join(str(option) for option in allowed)
            raise UnsupportedModelError(
                f"{config.model_type}: {key} '{value}' is not supported; supported: {supported}"
            )
