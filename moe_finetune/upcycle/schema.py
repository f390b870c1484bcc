"""The recipe of ``moe-finetune upcycle``, read and validated like training recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.recipe.explain_errors import check_trainer, from_tree
from moe_finetune.recipe.method import Method, resolve_method
from moe_finetune.recipe.section_base import Section, WholeRecipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import load_tree

Trainer = dict[str, Any]
FIELDS = "fields of SFTConfig"
EPOCHS = "num_train_epochs"
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What NumPy, scikit-learn and transformers take as a seed."""
Size = Annotated[int, Field(ge=1)]


class PretrainSection(Section):
    """A small Llama to pretrain; head size 32 (64 from a hidden size of 512)."""

    tokenizer: str = Field(min_length=1, description="folder or hub id of its tokenizer")
    hidden_size: int = Field(default=128, ge=32, multiple_of=32, description="hidden size")
    intermediate_size: int = Field(default=256, ge=8, description="width of the feed-forwards")
    layers: int = Field(default=4, ge=1, description="number of decoder layers")
    seed: Seed = Field(default=0, description="seed of the random weights")
    trainer: Trainer = Field(default={}, description=FIELDS)


class DenseSection(Section):
    """The dense model: a checkpoint, or a small model that is first pretrained on the texts."""

    path: str | None = Field(default=None, min_length=1, description="folder or hub id")
    revision: str | None = Field(default=None, description="branch, tag or commit on the hub")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="type of the stored weights"
    )
    pretrain: PretrainSection | None = None

    @model_validator(mode="after")
    def _one(self) -> DenseSection:
        if (self.path is None) == (self.pretrain is None):
            raise ValueError(
                "set either `path` (a checkpoint) or `pretrain` (a small Llama pretrained here)"
            )
        return self

    @property
    def pretrained(self) -> PretrainSection:
        """The model to pretrain, where ``path`` is not set."""
        assert self.pretrain is not None
        return self.pretrain


class TextSection(Section):
    """The texts: a source for each category."""

    categories: dict[str, str | list[str]] = Field(
        description="each category's source or sources; a row has `text`"
    )
    max_length: int = Field(default=2048, ge=8, description="tokens in a training row")
    limit: int | None = Field(default=None, ge=10, description="most texts of a category")
    seed: Seed = Field(default=0, description="seed of the split into train, validation and test")


class ClusterSection(Section):
    """How categories become the data of N experts."""

    count: int = Field(default=8, ge=2, description="number of clusters, and of experts")
    pinned: dict[str, int] = Field(default={}, description="category -> cluster, from 0")
    exclusive: bool = Field(
        default=False, description="clusters with pinned categories get no others"
    )
    sizes: tuple[Size, Size] | None = Field(
        default=None,
        strict=False,
        description="fewest and most categories of a cluster; default: equal, or as pinned",
    )
    restarts: int = Field(default=16, ge=1, description="starts of the clustering; the best stays")
    seed: Seed = Field(default=0, description="seed of the clustering")


class MergeSection(Section):
    """The MoE that the experts become."""

    top_k: int = Field(default=2, ge=1, description="experts per token")
    router_std: float = Field(default=0.02, ge=0, description="of the random routers' weights")


class TrainingSection(Section):
    """One kind of training: of the experts, of only the routers, or of every arm."""

    trainer: Trainer = Field(default={}, description=FIELDS)


class ArmSection(TrainingSection):
    """A model to fine-tune and compare; its ``trainer`` overrides ``finetune.trainer``."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    start: Literal["dense", "merged", "router"] = Field(description="the model that is fine-tuned")
    label: str | None = Field(default=None, description="name in tables; default: the key")
    method: Method = Field(default=Method(), description="losses, as in a training recipe")
    expert_steps: bool = Field(
        default=False, description="from `dense`: trained for an expert's steps as well"
    )
    router_learning_rate: float | None = Field(
        default=None, gt=0, description="learning rate of the routers; default: the trainer's"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        try:
            return value if isinstance(value, Method) else resolve_method(value)
        except RecipeError as problem:  # pydantic then names the arm
            raise ValueError(str(problem).removeprefix("method.")) from None

    @model_validator(mode="after")
    def _fits(self) -> ArmSection:
        if self.start == "dense" and (self.method.terms or self.router_learning_rate is not None):
            raise ValueError("start: dense has no router; remove terms and router_learning_rate")
        if self.expert_steps and self.start != "dense":
            raise ValueError(
                "expert_steps: only valid with start: dense, because the experts of "
                f"'{self.start}' are already trained; leave it out"
            )
        if self.method.bias_update is not None:
            raise ValueError("method.bias_update: these checkpoints cannot store a routing bias")
        return self


class EvaluationSection(Section):
    """The measurements of every arm."""

    texts: int | None = Field(
        default=None, ge=1, description="texts measured per category and split; default: all"
    )
    tokens_per_batch: int = Field(default=4096, ge=1, description="tokens in one forward pass")
    suite: str | None = Field(
        default=None,
        description="suite that asks every arm, such as the paper's Table 2: its name or file",
    )


class UpcycleRecipe(WholeRecipe):
    """All settings of an upcycle from a dense model to a mixture of experts."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    dense: DenseSection
    texts: TextSection
    clusters: ClusterSection = ClusterSection()
    merge: MergeSection = MergeSection()
    experts: TrainingSection = TrainingSection()
    router: TrainingSection = TrainingSection()
    finetune: TrainingSection = TrainingSection()
    arms: dict[str, ArmSection] = Field(min_length=1, description="models that are compared")
    evaluation: EvaluationSection = EvaluationSection()
    seeds: list[Seed] = Field(
        default=[0], min_length=1, description="seeds of experts, routers and fine-tuning"
    )

    @model_validator(mode="after")
    def _agree(self) -> UpcycleRecipe:
        if problems := list(_problems(self)):
            raise RecipeError("\n".join(problems))
        return self

    def adds_expert_steps(self, arm: ArmSection) -> bool:
        """Return whether the arm also trains for an expert's steps: not if it sets its own."""
        return arm.expert_steps and not {"max_steps", EPOCHS} & set(arm.trainer)

    def trainer_of(self, arm: ArmSection) -> Trainer:
        """TRL's arguments for an arm's fine-tuning, plus an expert's steps if the arm has them."""
        trainer, expert = {**self.finetune.trainer, **arm.trainer}, self.experts.trainer
        if not self.adds_expert_steps(arm):
            return trainer
        if "max_steps" in trainer:
            return {**trainer, "max_steps": trainer["max_steps"] + expert["max_steps"]}
        # An expert's epoch is over its own share of the texts.
        share = expert.get(EPOCHS, 3) / self.clusters.count
        return {**trainer, EPOCHS: trainer.get(EPOCHS, 3) + share}


def load_upcycle_recipe(
    paths: Sequence[str | Path], overrides: Sequence[str] = ()
) -> UpcycleRecipe:
    """Read, merge, override and validate recipe files (later ones win)."""
    return from_tree(UpcycleRecipe, load_tree(paths, overrides))


def _problems(recipe: UpcycleRecipe) -> Iterator[str]:
    """Yield combinations that cannot run, one line each, starting with the key to change."""
    clusters, names = recipe.clusters, list(recipe.texts.categories)
    for name, cluster in clusters.pinned.items():
        if name not in names:
            yield f"clusters.pinned.{name}: no such category{did_you_mean(name, names)}"
        elif not 0 <= cluster < clusters.count:
            yield f"clusters.pinned.{name}: {cluster}; clusters are 0 to {clusters.count - 1}"
    if recipe.merge.top_k > clusters.count:
        yield f"merge.top_k: {recipe.merge.top_k} is more than the {clusters.count} experts"
    if len(set(recipe.seeds)) < len(recipe.seeds):
        yield "seeds: give each number only once"
    steps = {"max_steps" in section.trainer for section in (recipe.experts, recipe.finetune)}
    for name, arm in recipe.arms.items():
        if recipe.adds_expert_steps(arm) and len(steps) > 1:
            yield (
                f"arms.{name}.expert_steps: steps and epochs cannot be added; set max_steps in "
                "experts.trainer and in finetune.trainer, or in neither"
            )
        if not re.fullmatch("[a-z0-9_]+", name):
            yield (
                f"arms.{name}: an arm's name is a folder, so it may contain only a-z, 0-9 and _; "
                "set `label` for tables"
            )
    labels = [arm.label or name for name, arm in recipe.arms.items()]
    if len(set(labels)) < len(labels):
        yield f"arms: {', '.join(labels)}: a label occurs twice; change one"
    sections: dict[str, TrainingSection] = {
        "experts": recipe.experts,
        "router": recipe.router,
        "finetune": recipe.finetune,
        **{f"arms.{name}": arm for name, arm in recipe.arms.items()},
    }
    trainers = {key: section.trainer for key, section in sections.items()}
    if recipe.dense.pretrain is not None:
        trainers["dense.pretrain"] = recipe.dense.pretrain.trainer
    for key, trainer in trainers.items():
        yield from (f"{key}.{line}" for line in check_trainer(trainer, STAGES["sft"]) if trainer)
        if "seed" in trainer:
            yield f"{key}.trainer.seed: cannot be set here: set `seeds`"
