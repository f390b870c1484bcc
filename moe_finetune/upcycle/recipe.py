"""The recipe of ``moe-finetune upcycle``, read and validated like training recipes.

The defaults are P3's: eight experts, two per token, texts split 8:1:1, and the arms Dense (which
also trains for an expert's steps, and once more at the experts' learning rate), Branch-Train-MiX
and SvMoE, both without and with load balancing (gshard on top-k scores, 0.01).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.recipe.dropped import without_dropped
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.section import WholeRecipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.tree import load_tree
from moe_finetune.recipe.validation import from_tree
from moe_finetune.upcycle.corpus import SOURCES
from moe_finetune.upcycle.sections import (
    ArmSection,
    ClusterSection,
    DenseSection,
    EvaluationSection,
    ExpertSection,
    FinetuneSection,
    MergeSection,
    RouterSection,
    TextSection,
)

EPOCHS = "num_train_epochs"
ALL_TARGETS = ("attention", "shared_experts", "experts")
DENSE_TARGETS: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "experts": ("gate_proj", "up_proj", "down_proj"),
}
"""``lora.targets`` -> modules of a dense model, whose feed-forward becomes an expert."""

_NOT_HERE = {"parts", "use_rslora", "init", "start"}


def _paper_arms(recipe: dict[str, Any]) -> dict[str, ArmSection]:
    """P3's five arms, and Dense at the experts' learning rate if fine-tuning uses another.

    The paper does not print its rates; at fine-tuning's rate, Dense is the weaker baseline.
    """
    balance = {"preset": "supervised_routing_baseline"}
    rates = [
        recipe[stage].trainer.get("learning_rate") if stage in recipe else None
        for stage in ("experts", "finetune")
    ]
    fast = {}
    if rates[0] not in (None, rates[1]):
        fast["dense_experts_rate"] = ArmSection(
            start="dense",
            label="Dense, experts' rate",
            expert_steps=True,
            trainer={"learning_rate": rates[0]},
        )
    return {
        "dense": ArmSection(start="dense", label="Dense", expert_steps=True),
        **fast,
        "btx": ArmSection(start="merged", label="BTX"),
        "btx_balance": ArmSection(
            start="merged", label="BTX + balance", method=resolve_method(balance)
        ),
        "svmoe_balance": ArmSection(
            start="router", label="SvMoE + balance", method=resolve_method(balance)
        ),
        "svmoe": ArmSection(start="router", label="SvMoE"),
    }


class UpcycleRecipe(WholeRecipe):
    """All settings of an upcycle from a dense model to a mixture of experts."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    dense: DenseSection
    texts: TextSection
    clusters: ClusterSection = ClusterSection()
    experts: ExpertSection = ExpertSection()
    merge: MergeSection = MergeSection()
    router: RouterSection = RouterSection()
    finetune: FinetuneSection = FinetuneSection()
    arms: dict[str, ArmSection] = Field(
        default_factory=_paper_arms,
        description="models that are fine-tuned and compared; default: P3's five, and Dense at the "
        "experts' learning rate where fine-tuning has another",
    )
    evaluation: EvaluationSection = EvaluationSection()
    seeds: list[int] = Field(default=[0], description="seeds of experts, routers and fine-tuning")

    @model_validator(mode="after")
    def _agree(self) -> UpcycleRecipe:
        problems = [*_contradictions(self), *_trainer_problems(self)]
        if problems:
            raise RecipeError("\n".join(problems))
        return self

    def adds_expert_steps(self, arm: ArmSection) -> bool:
        """Return whether an expert's steps are known and the arm does not set steps."""
        durations = {"max_steps", EPOCHS} & set(arm.trainer)
        return arm.expert_steps and self.experts.checkpoints is None and not durations

    def trainer_of(self, arm: ArmSection) -> dict[str, Any]:
        """TRL's arguments for an arm's fine-tuning, plus an expert's steps if the arm has them."""
        trainer = {**self.finetune.trainer, **arm.trainer}
        if not self.adds_expert_steps(arm):
            return trainer
        expert = self.experts.trainer
        if "max_steps" in trainer:
            return {**trainer, "max_steps": trainer["max_steps"] + expert["max_steps"]}
        # An expert's epoch is over its own share of the texts.
        share = expert.get(EPOCHS, 3) / self.clusters.count
        return {**trainer, EPOCHS: trainer.get(EPOCHS, 3) + share}


def load_upcycle_recipe(
    paths: Sequence[str | Path], overrides: Sequence[str] = ()
) -> UpcycleRecipe:
    """Read, merge, override and validate recipe files (later ones win).

    Raises:
        RecipeError: one line for each problem, with the file, line and dotted key.
    """
    return from_tree(UpcycleRecipe, without_dropped(load_tree(paths, overrides)))


def _contradictions(recipe: UpcycleRecipe) -> Iterator[str]:
    """Yield combinations that cannot run, one line each, starting with the key to change."""
    dense, texts, clusters = recipe.dense, recipe.texts, recipe.clusters
    if (dense.path is None) == (dense.pretrain is None):
        yield (
            "dense: set either `path` (a checkpoint) or `pretrain` (a small Llama pretrained here)"
        )
    if (texts.categories is None) == (texts.corpus is None):
        yield "texts: set either `categories` (name: file) or `corpus: python`"
    names = list(texts.categories or (SOURCES if texts.corpus is not None else ()))
    yield from _cluster_problems(clusters, names)
    if recipe.merge.top_k > clusters.count:
        yield f"merge.top_k: {recipe.merge.top_k} is more than the {clusters.count} experts"
    checkpoints = recipe.experts.checkpoints
    if checkpoints is not None and len(checkpoints) != clusters.count:
        yield (
            f"experts.checkpoints: has {len(checkpoints)} checkpoints for {clusters.count} "
            "clusters; give one for each"
        )
    free = sorted(set(names) - set(clusters.pinned))
    if checkpoints is not None and clusters.table is None and free:
        yield (
            f"experts.checkpoints: '{free[0]}' is not pinned, and newly computed clusters may "
            "differ from those that the experts were trained on; give the experts' "
            "clusters.table, or pin every category"
        )
    for name, arm in recipe.arms.items():
        steps = ["max_steps" in section.trainer for section in (recipe.experts, recipe.finetune)]
        if recipe.adds_expert_steps(arm) and steps[0] != steps[1]:
            yield (
                f"arms.{name}.expert_steps: steps and epochs cannot be added; set max_steps in "
                "experts.trainer and in finetune.trainer, or in neither"
            )
    if not recipe.arms:
        yield "arms: is empty; add at least one model to compare"
    if not recipe.seeds or len(set(recipe.seeds)) < len(recipe.seeds):
        yield "seeds: give at least one number, each only once"
    for name in recipe.arms:
        if not re.fullmatch("[a-z0-9_]+", name):
            yield (
                f"arms.{name}: an arm's name is a folder, so it may contain only a-z, 0-9 and _; "
                "set `label` for tables"
            )
    labels = [arm.label or name for name, arm in recipe.arms.items()]
    if len(set(labels)) < len(labels):
        yield f"arms: {', '.join(labels)}: a label occurs twice; change one"


def _cluster_problems(clusters: ClusterSection, names: list[str]) -> Iterator[str]:
    for name, cluster in clusters.pinned.items():
        if name not in names:
            yield f"clusters.pinned.{name}: no such category{did_you_mean(name, names)}"
        elif not 0 <= cluster < clusters.count:
            yield f"clusters.pinned.{name}: {cluster}; clusters are 0 to {clusters.count - 1}"


def _trainer_problems(recipe: UpcycleRecipe) -> Iterator[str]:
    from moe_finetune.recipe.stages import STAGES
    from moe_finetune.recipe.validation import check_trainer

    sections = {
        "dense.pretrain": recipe.dense.pretrain.trainer if recipe.dense.pretrain else {},
        "experts": recipe.experts.trainer,
        "router": recipe.router.trainer,
        "finetune": recipe.finetune.trainer,
        **{f"arms.{name}": arm.trainer for name, arm in recipe.arms.items()},
    }
    for key, trainer in sections.items():
        if trainer:
            yield from (f"{key}.{line}" for line in check_trainer(trainer, STAGES["sft"]))
        if "seed" in trainer:
            yield f"{key}.trainer.seed: cannot be set here: set `seeds`"
    yield from _lora_problems("experts", recipe.experts.lora, dense=True)
    dense_arms = any(arm.start == "dense" for arm in recipe.arms.values())
    yield from _lora_problems("finetune", recipe.finetune.lora, dense=dense_arms)
    targets = recipe.experts.lora.targets if recipe.experts.lora else ["experts"]
    if "experts" not in targets:
        yield (
            f"experts.lora.targets: {targets} leaves out the feed-forwards, the only parts in "
            "which experts differ after the merge; add 'experts'"
        )


def _lora_problems(section: str, lora: LoraSection | None, dense: bool) -> Iterator[str]:
    """Yield adapter options that these models do not support; ``dense``: for a dense model."""
    if lora is None:
        return
    if lora.rank is None:
        yield f"{section}.lora.rank: required, but missing; set a whole number such as 32"
    for option in sorted(_NOT_HERE & lora.model_fields_set):
        if getattr(lora, option) != LoraSection.model_fields[option].default:
            yield f"{section}.lora.{option}: cannot be set in an upcycle recipe; leave it out"
    if "shared_experts" in lora.targets and len(lora.targets) < len(ALL_TARGETS):
        yield f"{section}.lora.targets: these models have no shared_experts; leave them out"
    if dense and not set(DENSE_TARGETS) & set(lora.targets):
        yield (
            f"{section}.lora.targets: {lora.targets} adapts nothing of a dense model; choose "
            f"from {', '.join(DENSE_TARGETS)}"
        )
    if dense and lora.experts != "all":
        yield (
            f"{section}.lora.experts: a dense model has no experts to choose from; leave it out"
            + (", or compare no arm that starts from 'dense'" if section == "finetune" else "")
        )
