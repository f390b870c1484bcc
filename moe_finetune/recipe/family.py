"""``model.family`` of a recipe: the facts of a model type that the toolkit does not know yet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moe_finetune.recipe.section import Section


class DiskSection(Section):
    """Names in the files of one MoE layer, as in ``DiskLayout``; ``{layer}`` and ``{expert}``."""

    block: str = "model.layers.{layer}.mlp"
    router: str = "gate.weight"
    router_bias: str | None = Field(
        default=None, description="correction bias that is added for the selection alone"
    )
    gate: str | None = "experts.{expert}.gate_proj.weight"
    up: str = "experts.{expert}.up_proj.weight"
    down: str = "experts.{expert}.down_proj.weight"
    gate_up: str | None = Field(default=None, description="where one tensor holds all experts")
    transposed: bool = False
    per_expert: list[str] = Field(default=[])


class FamilySection(Section):
    """Facts of a family, by the names of ``Family``'s fields.

    What depends on the config is the name of its key (``renormalize: norm_topk_prob``), or a value
    that holds for all checkpoints of the type. ``score``, ``renormalize`` and ``scaling`` are how
    the router turns its logits into weights and have no default: they cannot be seen from outside.
    """

    model_type: str = Field(min_length=1)
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    renormalize: bool | str
    scaling: float | str
    attention_targets: list[str] = Field(min_length=1)
    shared_targets: list[str] = Field(default=[])
    disk: DiskSection = DiskSection()
    block_path: str = "mlp"
    router_name: str = "gate"
    router_weight: str = "weight"
    router_returns: list[str] = Field(default=["logits", "weights", "index"], min_length=1)
    router_logits: str | None = None
    gated: bool = True
    experts_name: str = "experts"
    num_experts: int | str = "num_experts"
    top_k: int | str = "num_experts_per_tok"
    expert_width: int | str = "moe_intermediate_size"
    groups: list[int | str] = Field(default=[1, 1], min_length=2, max_length=2)
    title: str | None = None

    @model_validator(mode="after")
    def _order(self) -> FamilySection:
        if len(set(self.router_returns)) != len(self.router_returns):
            raise ValueError(
                f"router_returns: {self.router_returns} is not right; wanted logits, weights and "
                "index in the router's order, each once"
            )
        return self


DECLARED: dict[str, FamilySection] = {}
"""What the recipes of this process have declared, by ``model_type``; a later one replaces."""
