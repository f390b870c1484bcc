"""The sections of a recipe; the longer ones are in ``data.py`` and ``method.py``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from moe_finetune.recipe.data import DataSection as DataSection
from moe_finetune.recipe.section_base import Section

# transformers' attention kernels; it would also accept a hub id and download code.
Attention = Literal[
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
]
Target = Literal["attention", "shared_experts", "experts"]
Part = Literal["attention", "shared_experts", "experts", "router", "shared_expert_gate"]
Replay = Literal["off", "old_policy", "rollout"]
Positive = Annotated[int, Field(ge=1)]
LEAST_AUTO_RANK = 4
"""Of ``lora.parts.experts.rank: auto``: a lower rank hardly saves memory."""


class ModelSection(Section):
    """The checkpoint to start from.

    ``init: random`` reads only its config and tokenizer, overrides config keys by ``config``, and
    trains a model from scratch, without an adapter.
    """

    path: str = Field(min_length=1, description="checkpoint folder or hub id")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="number format in training; a merge keeps the base's, or takes `merge --dtype`",
    )
    quantization: Literal["none", "nf4"] = Field(
        default="none", description="number format of frozen weights while an adapter trains"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(default=None, description="folder or hub id; default: path")
    attn_implementation: Attention | None = Field(
        default=None, description="attention kernel; default: transformers' own choice"
    )
    experts_kernel: Literal["auto", "grouped", "loop"] = Field(
        default="auto", description="grouped: one product for all experts (GPUs); loop: one each"
    )
    offload: Literal["none", "experts"] = Field(
        default="none", description="frozen experts in host memory, those of two layers on the GPU"
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="`random` trains from scratch and needs `lora: null`"
    )
    config: dict[str, Any] = Field(default={}, description="config.json's keys for `init: random`")


class ParallelSection(Section):
    """What the processes of a launcher share; each still has its own batches."""

    experts: Positive | Literal["all"] = Field(
        default=1, description="ranks that share the routed experts, each with its part, or `all`"
    )


RouterLayers = Literal["all"] | list[int]


class RouterSection(Section):
    """How the routers learn: all weights, through LoRA, or not at all.

    ``replay``, of stage grpo: each token is trained with the experts that the old policy's forward
    or vLLM's rollout selected for it, weighted by the current router.
    """

    train: Literal["auto", "full", "lora", "frozen"] = Field(
        default="auto",
        description="full: all router weights train; lora: LoRA on them; frozen: none train; auto: "
        "frozen next to an adapter if no loss of the method trains routers, else full",
    )
    layers: RouterLayers = Field(
        default="all",
        description="decoder layers whose routers train; -1 is the last MoE layer",
    )
    replay: Replay = Field(
        default="off", description="in grpo, an earlier forward whose experts train each token"
    )

    @field_validator("layers")
    @classmethod
    def _some(cls, value: RouterLayers) -> RouterLayers:
        if value == []:
            raise ValueError("an empty list trains no router; set router.train: frozen")
        return value

    @field_validator("replay", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value


class LoraPart(Section):
    """Rank and alpha of one part; ``alpha`` keeps the section's ratio of alpha to rank."""

    rank: Positive | Literal["auto"] = Field(
        description="rank of every adapted matrix of this part; `auto`, for experts: the rank of "
        "the `lora` section over the number of experts per token, at least 4"
    )
    alpha: float | None = Field(
        default=None, gt=0, le=1e6, description="default: in the `lora` section's ratio to rank"
    )

    def resolved(self, lora: LoraSection, top_k: int) -> tuple[int, float]:
        """Rank and alpha in a model with ``top_k`` experts per token."""
        assert lora.rank is not None and lora.alpha is not None
        rank = max(LEAST_AUTO_RANK, lora.rank // top_k) if self.rank == "auto" else self.rank
        return rank, self.alpha if self.alpha is not None else lora.alpha / lora.rank * rank


class ChosenExperts(Section):
    """Experts that get LoRA: those that the run's own training rows use most, measured before the
    adapter is made, or those of a file.
    """

    top: float | None = Field(
        default=None, gt=0, le=1, description="share of each layer's experts, rounded up"
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="as many of a layer as have this share of its tokens (ESFT)",
    )
    file: str | None = Field(default=None, min_length=1, description="a file that `select` wrote")
    by: Literal["counts", "random"] = Field(
        default="counts", description="`random` draws `top` by the seed, to compare with"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.top, self.top_p, self.file)) != 1:
            raise ValueError("give one of top, top_p and file; null removes the others")
        if self.by == "random" and self.top is None:
            raise ValueError("by: random needs top, the share of experts to draw")
        return self


class LoraSection(Section):
    """The adapter; ``lora: null`` trains the whole model. ``alpha`` defaults to 4 x rank (P0)."""

    rank: int | None = Field(default=None, ge=1, lt=2**31, description="of every adapted matrix")
    alpha: float | None = Field(
        default=None, gt=0, le=1e6, description="scaling is alpha / rank; default: 4 x rank"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before the adapter")
    targets: list[Target] = Field(
        default=["attention", "shared_experts", "experts"],
        description="modules that get LoRA; routers: `router.train`",
    )
    shared_expert_gate: Literal["frozen", "lora", "full"] = Field(
        default="frozen",
        description="the one row by which Qwen's models weigh their shared expert: `full` trains "
        "it, `lora` gives it LoRA",
    )
    experts: str | ChosenExperts = Field(
        default="all",
        description="`all`, a file that `select` wrote, or the most used ones, measured by the run",
    )
    parts: dict[Part, LoraPart] = Field(
        default={},
        description="rank and alpha of attention, shared_experts, experts, router or "
        "shared_expert_gate",
    )
    use_rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank)")
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming", description="initialization of the LoRA matrix A"
    )
    shared_outer: bool = Field(
        default=False,
        description="a layer's experts share A of gate and up, and B of down: 36 % of the factors",
    )
    start: str | None = Field(default=None, description="adapter to continue from")

    def adapts(self, router: str) -> bool:
        """Whether an adapter is made; otherwise some of the model's own weights train."""
        trained = {router, self.shared_expert_gate}
        return bool(self.targets) or "lora" in trained or "full" not in trained

    @field_validator("experts")
    @classmethod
    def _file(cls, value: str | ChosenExperts) -> str | ChosenExperts:
        """A file's name stands for itself."""
        return value if isinstance(value, str) or value.file is None else value.file

    @model_validator(mode="after")
    def _shared(self) -> LoraSection:
        if self.shared_outer and "experts" not in self.targets:
            raise ValueError(
                "shared_outer shares factors of experts: it needs 'experts' among targets"
            )
        return self

    @model_validator(mode="after")
    def _alpha(self) -> LoraSection:
        if self.rank is not None:
            self.alpha = 4.0 * self.rank if self.alpha is None else self.alpha
            for part in self.parts.values():
                if part.alpha is None and part.rank != "auto":
                    part.alpha = self.alpha / self.rank * part.rank
        return self


class RewardSection(Section):
    """A reward for reinforcement learning."""

    name: str = Field(
        description="exact_match, boxed, code, or one that a plugin or a package registers"
    )
    weight: float = Field(
        default=1.0, ge=-1e6, le=1e6, allow_inf_nan=False, description="of this reward in the sum"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class ExportSection(Section):
    """What is written after training. ``verify`` defaults to ``merge``."""

    merge: bool = Field(default=True, description="write the merged checkpoint, `merged/`")
    verify: bool | None = Field(
        default=None, description="compare `merged/` with base + adapter; default: as `merge`"
    )

    @model_validator(mode="after")
    def _verify(self) -> ExportSection:
        if self.verify is None:
            self.verify = self.merge
        return self


class EvaluationSection(Section):
    """The suites for the merged checkpoint and, with ``every``, for states during training.

    These states are separate from the training checkpoints. They are scored after training; then
    their weights are deleted.
    """

    suite: str = Field(min_length=1, description="name of a suite, or its YAML file")
    backend: Literal["vllm", "hf"] = Field(default="vllm", description="generates the answers")
    only: list[str] | None = Field(default=None, min_length=1, description="labels of tasks")
    limit: int | None = Field(default=None, ge=1, description="items per task; default: all")
    every: int | None = Field(default=None, ge=1, description="also score every so many steps")
    base: bool = Field(
        default=True, description="also score the untrained model, once for all runs from it"
    )
    data_dir: str | None = Field(default=None, description="local task data; nothing is downloaded")
    vllm: dict[str, Any] = Field(default={}, description="arguments of vLLM's engine")
