"""``model.family`` of a recipe: the facts of a model type that the toolkit does not know yet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Strict, model_validator

from moe_finetune.recipe.section import Section

Texts = Annotated[tuple[str, ...], Strict(False)]  # YAML has lists, which may change


class DiskSection(Section):
    """Names in the files of one MoE layer, as in ``DiskLayout``; ``{layer}`` and ``{expert}``."""

    block: str = Field(default="model.layers.{layer}.mlp", description="the MoE block")
    router: str = Field(default="gate.weight", description="router weight")
    router_bias: str | None = Field(
        default=None, description="correction bias that is added only for the selection"
    )
    gate: str | None = Field(
        default="experts.{expert}.gate_proj.weight", description="gate projection of one expert"
    )
    up: str = Field(
        default="experts.{expert}.up_proj.weight", description="up projection of one expert"
    )
    down: str = Field(
        default="experts.{expert}.down_proj.weight",
        description="down projection of one expert, or of all",
    )
    gate_up: str | None = Field(default=None, description="where one tensor contains all experts")
    transposed: bool = Field(default=False, description="stacks are stored (expert, in, out)")
    per_expert: Texts = Field(default=(), description="further tensors with one row per expert")


class Rows(Section):
    """What transformers' class of a family needs for packed rows and padding.

    Taken from each class and tested for every family: a sequence's results depend neither on
    another one in its row nor on padding.
    """

    model_config = ConfigDict(frozen=True)

    masks_by_position: bool = Field(
        default=True,
        description="attention ends where positions start again; otherwise masks are built",
    )
    per_sequence: Texts = Field(
        default=(),
        description="classes in a layer that carry a state or a convolution from token to token; "
        "they run one sequence at a time",
    )
    padding: Literal["unseen", "moves", "read"] = Field(
        default="unseen",
        description="what masked left padding does: nothing, it moves absolute positions, or "
        "per_sequence read it",
    )
    generates_padded: bool = Field(
        default=True, description="whether generation is the same with left padding"
    )


class FamilySection(Section):
    """Facts of a family, by the names of ``Family``'s fields.

    A fact that depends on the config is given as the config's key (``renormalize:
    norm_topk_prob``), or as one value for all checkpoints of the type. ``score``, ``renormalize``
    and ``scaling`` are how the router turns its logits into weights and have no default: they
    cannot be detected.
    """

    model_type: str = Field(min_length=1, description="as in config.json")
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        description="from logits to scores"
    )
    renormalize: bool | str = Field(description="whether selected scores are divided by their sum")
    scaling: float | str = Field(description="factor of the selected scores")
    attention_targets: Texts = Field(min_length=1, description="linear layers that LoRA adapts")
    shared_targets: Texts = Field(
        default=(), description="linear layers of shared experts that LoRA adapts"
    )
    disk: DiskSection = DiskSection()
    block_path: str = Field(
        default="mlp", description="module with router and experts, in a decoder layer"
    )
    router_name: str = Field(default="gate", description="the router's module in the block")
    router_weight: str = Field(default="weight", description="the weight in that module")
    router_returns: Texts = Field(
        default=("logits", "weights", "index"),
        min_length=1,
        description="what it returns, in order",
    )
    router_logits: str | None = Field(
        default=None, description="the module in it whose output is the logits"
    )
    gated: bool = Field(default=True, description="experts have a gate projection")
    experts_name: str = Field(default="experts", description="the experts' module in the block")
    num_experts: int | str = Field(default="num_experts", description="routed experts")
    top_k: int | str = Field(default="num_experts_per_tok", description="experts a token")
    expert_width: int | str = Field(
        default="moe_intermediate_size", description="inner width of an expert"
    )
    groups: list[int | str] = Field(
        default=[1, 1],
        min_length=2,
        max_length=2,
        description="groups of experts, and how many a token may select from",
    )
    rows: Rows = Rows()
    title: str | None = Field(default=None, description="for tables")

    @model_validator(mode="after")
    def _order(self) -> FamilySection:
        if len(set(self.router_returns)) != len(self.router_returns):
            raise ValueError(
                f"router_returns: must be logits, weights and index in the router's order, "
                f"each once, not {[*self.router_returns]}"
            )
        return self


DECLARED: dict[str, FamilySection] = {}
"""Families that recipes of this process have declared, by ``model_type``; the last one wins."""
