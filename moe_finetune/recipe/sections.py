"""The sections of a recipe: their keys, and which combinations of them cannot run.

``conflicts(recipe)`` of a section yields a line for each, starting with the key to change; the
recipe calls it once all sections are valid by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moe_finetune.recipe.data import DataSection as DataSection
from moe_finetune.recipe.lora import LoraSection as LoraSection
from moe_finetune.recipe.section import Section

BEST = "load_best_model_at_end"
# transformers' attention kernels; it would also accept a hub id and download code.
Attention = Literal[
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
]


class ModelSection(Section):
    """The checkpoint to start from.

    ``init: random`` reads only its config and tokenizer, overrides config keys by ``config``, and
    trains a model from scratch, without an adapter.
    """

    path: str = Field(min_length=1, description="checkpoint folder or hub id")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="number format of the weights and of the merged checkpoint"
    )
    quantization: Literal["none", "nf4"] = Field(
        default="none", description="number format of frozen weights while an adapter trains"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(
        default=None, description="tokenizer's folder or hub id; default: path"
    )
    attn_implementation: Attention | None = Field(
        default=None, description="attention kernel; default: transformers' own choice"
    )
    experts_kernel: Literal["auto", "grouped", "loop"] = Field(
        default="auto",
        description="grouped: one matrix product for all experts (GPUs); loop: one for each",
    )
    offload: Literal["none", "experts"] = Field(
        default="none",
        description="experts: frozen experts stay in host memory, those of two layers on the GPU",
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="`random` trains from scratch and needs `lora: null`"
    )
    config: dict[str, Any] = Field(
        default={}, description="keys of config.json to change, with `init: random`"
    )

    def conflicts(self, recipe: Any) -> Iterator[str]:
        if self.init == "random":
            if recipe.lora is not None:
                yield "lora: an adapter needs trained weights, not random ones; set lora: null"
            if recipe.router.train == "frozen":
                yield "router.train: 'frozen' would leave the routers random; set it to full"
            if recipe.stage not in ("sft", "pretrain"):
                yield (
                    f"model.init: 'random' weights cannot start with stage {recipe.stage}; "
                    "pretrain first"
                )
        elif self.config:
            yield "model.config: only valid for a new model; set model.init: random"
        key = f"model.quantization: '{self.quantization}'"
        if self.quantization != "none" and self.init == "random":
            yield f"{key} quantizes a checkpoint's weights; with model.init: random set it to none"
        elif self.quantization != "none" and recipe.lora is None:
            yield (
                f"{key} needs an adapter: quantized weights cannot be trained, and `lora: null` "
                "trains all weights; add a `lora:` section with a rank, or set "
                "model.quantization: none"
            )
        if self.offload != "none" and recipe.lora is None:
            yield (
                "model.offload: 'experts' needs an adapter: stacks that train must stay on the "
                "GPU; give a `lora:` section with a rank, or set model.offload: none"
            )


class ParallelSection(Section):
    """What the processes of a launcher share; each still has its own batches."""

    experts: int | Literal["all"] = Field(
        default=1,
        description="ranks that share the routed experts, each with its part, or `all`",
    )

    @field_validator("experts")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be 1 or more, or 'all', not {value}")
        return value

    def conflicts(self, recipe: Any) -> Iterator[str]:
        if self.experts == 1:
            return
        key, lora, model = f"parallel.experts: {self.experts}", recipe.lora, recipe.model
        if lora is None or not (lora.targets or recipe.router.train != "full"):
            yield (
                f"{key} needs an adapter: the experts stay frozen on their ranks; give a `lora:` "
                "section with a rank and targets, or train all weights by FSDP2 "
                "(recipes/hardware/fsdp2_8gpu.yaml)"
            )
        if model.offload != "none":
            yield (
                f"{key} cannot be combined with model.offload '{model.offload}', because "
                "spreading already leaves each GPU only its part of the experts; set one of "
                "them to its default"
            )
        for name in ("torch_compile", "fsdp", "deepspeed", "use_vllm"):
            if recipe.trainer.get(name):
                yield f"trainer.{name}: cannot be combined with {key}; leave one of them out"


class RouterSection(Section):
    """How the routers learn: all weights, through LoRA, or not at all.

    ``replay``, of stage grpo: a completion is trained with the experts that its tokens selected
    when it was sampled, weighted by the current router.
    """

    train: Literal["auto", "full", "lora", "frozen"] = Field(
        default="auto",
        description="full: all router weights train; lora: LoRA on them; frozen: none train; auto: "
        "frozen next to an adapter if no loss of the method trains routers, else full",
    )
    replay: bool = Field(
        default=False, description="stage grpo: train with the experts that the rollout selected"
    )

    def conflicts(self, recipe: Any) -> Iterator[str]:
        if recipe.lora is None and self.train == "lora":
            yield "router.train: 'lora' needs a `lora:` section with a rank"
        if not self.replay:
            return
        if recipe.stage != "grpo":
            yield (
                f"router.replay: only valid for stage grpo, and this is stage {recipe.stage}; "
                "leave it out"
            )
        for key in ("use_vllm", "use_transformers_continuous_batching"):
            if recipe.trainer.get(key):
                yield (
                    f"router.replay: with trainer.{key} TRL does not return the experts of a "
                    "rollout; leave that key out, or set router.replay: false"
                )
        if recipe.method.perturbations.random_second_choice:
            yield (
                "router.replay: method.perturbations.random_second_choice draws experts at "
                "random, but a replay uses those of the rollout; set one of them to false"
            )


class RewardSection(Section):
    """A reward for reinforcement learning."""

    name: str = Field(
        description="exact_match, boxed, code, or one that a plugin or a package registers"
    )
    weight: float = Field(
        default=1.0,
        ge=-1e6,
        le=1e6,
        allow_inf_nan=False,
        description="weight of this reward in the sum",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("file") is not None:
            raise ValueError(
                "a recipe runs no file; register its function as a reward "
                "(REWARDS.register, docs/extending.md), name that, and add --plugin FILE"
            )
        if isinstance(value, dict):  # of an earlier version
            value = {key: old for key, old in value.items() if key not in ("file", "function")}
        return {"name": value} if isinstance(value, str) else value


class ExportSection(Section):
    """What is written after training. ``verify`` defaults to ``merge``."""

    merge: bool = Field(default=True, description="write the merged checkpoint, `merged/`")
    verify: bool | None = Field(
        default=None,
        description="compare the merged checkpoint with base + adapter; default: as `merge`",
    )

    @model_validator(mode="after")
    def _verify(self) -> ExportSection:
        if self.verify is None:
            self.verify = self.merge
        return self

    def conflicts(self, recipe: Any) -> Iterator[str]:
        if self.verify and not self.merge:
            yield (
                "export.verify: true needs export.merge: true, because it checks the merged "
                "checkpoint; set export.merge: true"
            )
        if recipe.evaluation and not self.merge:
            yield "evaluation: needs export.merge: true, because the merged checkpoint is evaluated"


class EvaluationSection(Section):
    """The suites for the merged checkpoint and, with ``every``, for states during training.

    These states are separate from the training checkpoints. They are scored after training; then
    their weights are deleted.
    """

    suite: str = Field(min_length=1, description="name of a suite, or its YAML file")
    backend: Literal["vllm", "hf"] = Field(
        default="vllm", description="backend that generates the answers"
    )
    only: list[str] | None = Field(
        default=None, min_length=1, description="labels of the tasks to evaluate; default: all"
    )
    limit: int | None = Field(
        default=None, ge=1, description="number of items per task; default: all"
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="also evaluate every so many steps; default: only at the end",
    )
    base: bool = Field(
        default=True,
        description="also score the model before training, once for all runs that start from it",
    )
    data_dir: str | None = Field(
        default=None, description="folder with local task data; with it, nothing is downloaded"
    )
    vllm: dict[str, Any] = Field(default={}, description="arguments of vLLM's engine")

    def conflicts(self, recipe: Any) -> Iterator[str]:
        if self.every and recipe.trainer.get(BEST):
            yield (
                f"evaluation.every: its curve ends with the last step, but trainer.{BEST} "
                "returns to an earlier one; leave one of them out"
            )
