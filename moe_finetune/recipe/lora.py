"""The ``lora:`` section of a recipe: what is adapted, rank, scaling and initialization."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moe_finetune.recipe.section import Section

Part = Literal["attention", "shared_experts", "experts", "router"]
_RESIDUAL = re.compile(r"pissa(_niter_[1-9]\d?)?|olora")
_INITS = "kaiming, gaussian, orthogonal, pissa, pissa_niter_N (N from 1 to 99) or olora"
_NEEDS_DATA = ("corda", "eva", "lora_ga")


class LoraPart(Section):
    """Rank and alpha of one part; ``alpha`` keeps the section's ratio of alpha to rank."""

    rank: int = Field(ge=1, description="rank of every adapted matrix of this part")
    alpha: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="scaling; default: the ratio of alpha to rank of the `lora` section",
    )


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
    use_dora: bool = Field(
        default=False, description="DoRA, for attention only: PEFT has none for stacked experts"
    )
    init: str = Field(
        default="kaiming",
        description="kaiming, gaussian, orthogonal, pissa, pissa_niter_N or olora",
    )
    start: str | None = Field(
        default=None, description="adapter to continue from; default: a new one"
    )
    loraplus_lr_ratio: float | None = Field(
        default=None,
        ge=1,
        le=1e6,
        description="LoRA+: ratio of the learning rate of B to that of A",
    )

    @field_validator("init")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in _NEEDS_DATA:
            raise ValueError(
                f"'{value}' needs activations or gradients from data and is not supported; use "
                f"{_INITS}"
            )
        if value not in ("kaiming", "gaussian", "orthogonal") and not _RESIDUAL.fullmatch(value):
            raise ValueError(f"must be {_INITS}, not {value!r}")
        return value

    @model_validator(mode="after")
    def _alpha(self) -> LoraSection:
        if self.alpha is None and self.rank is not None:
            self.alpha = 4.0 * self.rank
        if self.alpha is not None and self.rank is not None:
            for part in self.parts.values():
                if part.alpha is None:
                    part.alpha = self.alpha / self.rank * part.rank
        return self

    @property
    def changes_base(self) -> bool:
        """Return whether ``init`` subtracts the initial ``B @ A`` from the base's weights."""
        return _RESIDUAL.fullmatch(self.init) is not None

    def adapted(self, router: str) -> set[str]:
        """The adapted parts if ``router.train`` is ``router``."""
        return {*self.targets, *(["router"] if router == "lora" else [])}

    def conflicts(self, recipe: Any) -> Iterator[str]:
        yield from self.problems(recipe.router.train)
        yield from self._start_conflicts(recipe)

    def _start_conflicts(self, recipe: Any) -> Iterator[str]:
        """Yield the conflicts of ``init``, ``start`` and ``use_dora``, one line each."""
        experts = recipe.parallel.experts
        others = {
            f"model.quantization '{recipe.model.quantization}'": (
                recipe.model.quantization != "none"
            ),
            f"model.offload '{recipe.model.offload}'": recipe.model.offload != "none",
            f"parallel.experts: {experts}": experts != 1,
        }
        for other in (name for name, active in others.items() if active):
            if self.changes_base or (self.init == "orthogonal" and "parallel" in other):
                yield (
                    f"lora.init: '{self.init}' cannot be combined with {other}; set one to its "
                    "default"
                )
            if self.loraplus_lr_ratio is not None and "parallel" in other:
                yield (
                    f"lora.loraplus_lr_ratio: cannot be combined with {other}; leave one of "
                    "them out"
                )
            if self.start is not None and ("parallel" in other or "offload" in other):
                yield f"lora.start: cannot be combined with {other}; leave one of them out"
            if self.use_dora:
                yield f"lora.use_dora: cannot be combined with {other}; set one to its default"
        if self.changes_base and recipe.stage not in ("sft", "pretrain"):
            yield (
                f"lora.init: '{self.init}' changes the base's weights while it trains, and stage "
                f"{recipe.stage} needs them as the reference; use kaiming, gaussian or orthogonal"
            )

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
        for part in self.parts:
            if part not in self.adapted(router):
                remedy = "set router.train: lora" if part == "router" else "add it to lora.targets"
                yield f"lora.parts.{part}: this part has no adapter; {remedy}, or leave it out"
        beside = sorted(self.adapted(router) - {"attention"})
        if self.use_dora and beside:
            yield (
                f"lora.use_dora: PEFT has no DoRA for parameters, and {', '.join(beside)} "
                f"{'is one' if len(beside) == 1 else 'are such'}; set lora.targets: [attention] "
                "and router.train: full or frozen, or leave use_dora out"
            )
        if self.use_dora and self.changes_base:
            yield (
                f"lora.use_dora: cannot be combined with lora.init '{self.init}', which changes "
                "the weights whose norms DoRA learns; set one of them to its default"
            )
        if self.init == "orthogonal":
            ranks = {"lora.rank": self.rank} | {
                f"lora.parts.{name}.rank": part.rank for name, part in self.parts.items()
            }
            for key, rank in ranks.items():
                if rank is not None and rank % 2:
                    yield f"{key}: lora.init 'orthogonal' needs an even rank, not {rank}"
        if self.start is not None and (self.changes_base or self.experts != "all" or self.use_dora):
            yield (
                "lora.start: works only with the default lora.init, all experts and no DoRA; "
                "leave one of them out, or merge the adapter and train from the merged "
                "checkpoint"
            )
        if self.loraplus_lr_ratio is not None and not self.adapted(router):
            yield "lora.loraplus_lr_ratio: no module has an adapter; add a part to lora.targets"
