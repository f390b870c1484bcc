"""The ``lora:`` section of a recipe: what is adapted, rank, scaling and start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moe_finetune.recipe.section import Section

Part = Literal["attention", "shared_experts", "experts", "router"]
LEAST_AUTO_RANK = 4
"""Of ``lora.parts.experts.rank: auto``: a lower rank hardly saves memory."""


class LoraPart(Section):
    """Rank and alpha of one part; ``alpha`` keeps the section's ratio of alpha to rank."""

    rank: int | Literal["auto"] = Field(
        description="rank of every adapted matrix of this part; `auto`, for experts: the rank of "
        "the `lora` section over the number of experts per token, at least 4"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="scaling; default: the ratio of alpha to rank of the `lora` section",
    )

    @field_validator("rank")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be 1 or more, or 'auto', not {value}")
        return value

    def resolved(self, lora: LoraSection, top_k: int) -> tuple[int, float]:
        """Rank and alpha in a model with ``top_k`` experts per token."""
        assert lora.rank is not None and lora.alpha is not None
        rank = max(LEAST_AUTO_RANK, lora.rank // top_k) if self.rank == "auto" else self.rank
        return rank, self.alpha if self.alpha is not None else lora.alpha / lora.rank * rank


class LoraSection(Section):
    """The adapter; ``lora: null`` trains the whole model. ``alpha`` defaults to 4 x rank (P0)."""

    rank: int | None = Field(
        default=None, ge=1, lt=2**31, description="rank of every adapted matrix"
    )
    alpha: float | None = Field(
        default=None, gt=0, le=1e6, description="scaling is alpha / rank; default: 4 x rank"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before the adapter")
    targets: list[Literal["attention", "shared_experts", "experts"]] = Field(
        default=["attention", "shared_experts", "experts"],
        description="what is adapted, besides the routers",
    )
    experts: str = Field(default="all", description="`all`, or a file that `select` wrote")
    parts: dict[Part, LoraPart] = Field(
        default={},
        description="rank and alpha by part: attention, shared_experts, experts or router",
    )
    use_rslora: bool = Field(
        default=False, description="scale by alpha / sqrt(rank) instead of alpha / rank"
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming", description="how A is initialized; B is 0"
    )
    start: str | None = Field(
        default=None, description="adapter to continue from; default: a new one"
    )

    @model_validator(mode="after")
    def _alpha(self) -> LoraSection:
        if self.alpha is None and self.rank is not None:
            self.alpha = 4.0 * self.rank
        if self.alpha is not None and self.rank is not None:
            for part in self.parts.values():
                if part.alpha is None and part.rank != "auto":
                    part.alpha = self.alpha / self.rank * part.rank
        return self

    def adapted(self, router: str) -> set[str]:
        """The adapted parts if ``router.train`` is ``router``."""
        return {*self.targets, *(["router"] if router == "lora" else [])}

    def conflicts(self, recipe: Any) -> Iterator[str]:
        yield from self.problems(recipe.router.train)
        experts, offload = recipe.parallel.experts, recipe.model.offload
        for other, active in (
            (f"model.offload '{offload}'", offload != "none"),
            (f"parallel.experts: {experts}", experts != 1),
        ):
            if active and self.start is not None:
                yield f"lora.start: cannot be combined with {other}; leave one of them out"

    def problems(self, router: str) -> Iterator[str]:
        """Yield combinations of the section's keys that cannot run, one line each."""
        if self.rank is None:
            yield "lora.rank: required, but missing; set a whole number such as 32"
        if not self.targets and router == "frozen":
            yield (
                "lora.targets: nothing trains with an empty list and router.train 'frozen'; add "
                "a target, or set router.train: full"
            )
        if self.experts != "all" and "experts" not in self.targets:
            yield "lora.experts: needs 'experts' in lora.targets; add it, or leave lora.experts out"
        for part, options in self.parts.items():
            if options.rank == "auto" and part != "experts":
                yield f"lora.parts.{part}.rank: 'auto' is for experts; set a whole number such as 8"
            if part not in self.adapted(router):
                remedy = "set router.train: lora" if part == "router" else "add it to lora.targets"
                yield f"lora.parts.{part}: this part has no adapter; {remedy}, or leave it out"
        if self.start is not None and self.experts != "all":
            yield (
                "lora.start: works only with all experts; leave one of them out, or merge the "
                "adapter and train from the merged checkpoint"
            )
