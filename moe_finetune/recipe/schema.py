"""A recipe: everything that decides a run, validated, resolved and hashed.

``load_recipe(["recipe.yaml"], ["data.train=my.jsonl"])`` -> :class:`Recipe`. The resolved recipe is
saved with the run, and loading that copy gives an equal recipe with the same hash. Its keys and
their rules are in ``sections.py``, ``data.py``, ``method.py`` and ``conflicts.py``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moe_finetune.errors import PluginError, RecipeError
from moe_finetune.plugins import use_installed
from moe_finetune.recipe.conflicts import conflicts
from moe_finetune.recipe.data import DataSection, Paths
from moe_finetune.recipe.early_check import check_early
from moe_finetune.recipe.explain_errors import check_trainer, from_tree
from moe_finetune.recipe.fields_of_trl import trainer_keys
from moe_finetune.recipe.method import Method, resolve_method, without_unusable_share
from moe_finetune.recipe.section_base import WholeRecipe
from moe_finetune.recipe.sections import (
    EvaluationSection,
    ExportSection,
    LoraSection,
    ModelSection,
    ParallelSection,
    RewardSection,
    RouterSection,
)
from moe_finetune.recipe.stages import STAGES, Name, trainer_section
from moe_finetune.recipe.yaml_tree import Tree, load_tree, merge_mappings


class Recipe(WholeRecipe):
    """A complete description of a run."""

    plugins: list[str] = Field(
        default=[], description="of installed packages, imported first; a file takes `--plugin`"
    )
    stage: Name = Field(default="sft", description="which of TRL's trainers runs")
    model: ModelSection = Field(description="the checkpoint to start from")
    method: Method = Field(default=Method(preset="none"), description="a preset, or a mapping")
    router: RouterSection = RouterSection()
    lora: LoraSection | None = Field(
        default=LoraSection(rank=32, alpha=128.0, dropout=0.1),
        description="the adapter; `null` trains the whole model",
    )
    data: DataSection
    trainer: dict[str, Any] = Field(
        default={}, description="fields of the stage's config in TRL, see [keys](trainer.md)"
    )
    export: ExportSection = ExportSection()
    evaluation: EvaluationSection | None = None
    parallel: ParallelSection = ParallelSection()
    rewards: list[RewardSection] = Field(
        default=[], description="reward functions of stage grpo, for example [boxed]"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        return value if isinstance(value, Method) else resolve_method(value)

    @field_validator("plugins")
    @classmethod
    def _plugins(cls, value: list[str]) -> list[str]:
        try:
            for name in value:
                use_installed(name)
        except PluginError as error:
            raise RecipeError(f"plugins: {error}") from None
        return value

    @field_validator("trainer")
    @classmethod
    def _trainer(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        stage = info.data.get("stage")  # missing if it is invalid itself
        section = trainer_section if "trl" in sys.modules else trainer_keys
        if value and stage and (problems := list(check_trainer(value, STAGES[stage], section))):
            raise RecipeError("\n".join(problems))
        return value

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        if self.stage == "pretrain":
            self.data = self.data.for_pretraining()
        if self.router.train == "auto":
            adapter = self.lora is not None and self.lora.targets and self.model.init != "random"
            frozen = adapter and not self.method.trains_routers
            self.router = self.router.model_copy(update={"train": "frozen" if frozen else "full"})
        if problems := list(conflicts(self)):
            raise RecipeError("\n".join(problems))
        return self

    @classmethod
    def from_preset(cls, preset: str, model: str, train: Paths, **sections: Any) -> Recipe:
        """A recipe from a preset, a checkpoint and training data; other sections as keywords.

        ``Recipe.from_preset("erc", "my/checkpoint", "my.jsonl", trainer={"max_steps": 50})``
        """
        values = {"model": {"path": model}, "method": {"preset": preset}, "data": {"train": train}}
        return recipe_from_tree(Tree(merge_mappings(values, sections)))

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved content; independent of file names and layout."""
        text = json.dumps(self.to_mapping(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def seed(self) -> int:
        """Seed of the run (``trainer.seed``, 42 when unset, as in transformers)."""
        return int(self.trainer.get("seed", 42))


def load_recipe(paths: Sequence[str | Path] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate recipe files (later ones win)."""
    if isinstance(paths, str | Path):
        paths = [paths]
    return recipe_from_tree(load_tree(paths, overrides))


def recipe_from_tree(tree: Tree) -> Recipe:
    """Validate merged values; raise a RecipeError with the place of each problem."""
    check_early(tree, Recipe)
    return from_tree(Recipe, without_unusable_share(tree))
