"""A recipe: everything that decides a run, validated, resolved and hashed.

``load_recipe(["recipe.yaml"], ["data.train=my.jsonl"])`` -> :class:`Recipe`. The resolved recipe is
saved with the run, and loading that copy gives an equal recipe with the same hash. Its keys are in
``sections.py`` and ``method.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.family import DECLARED
from moe_finetune.recipe.method import Method, resolve_method
from moe_finetune.recipe.section import WholeRecipe
from moe_finetune.recipe.sections import (
    DataSection,
    EvaluationSection,
    ExportSection,
    LoraSection,
    ModelSection,
    NumericsSection,
    ParallelSection,
    Paths,
    RewardSection,
    RouterSection,
)
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.tree import Tree, load_tree, merge_mappings
from moe_finetune.recipe.validation import from_tree

BEST = "load_best_model_at_end"


class Recipe(WholeRecipe):
    """A run, completely described. A ``model.family`` is known to the process from then on.

    ``rewards`` are of stage grpo, ``teacher`` of stage distill.
    """

    stage: str = Field(
        default="sft", description="`sft`, `pretrain`, `dpo`, `kto`, `orpo`, `grpo` or `distill`"
    )
    model: ModelSection = Field(description="the checkpoint to start from")
    method: Method = Field(
        default=Method(preset="none"), description="a preset's name, or a mapping"
    )
    router: RouterSection = RouterSection()
    lora: LoraSection | None = Field(
        default=LoraSection(rank=32, alpha=128.0, dropout=0.1),
        description="the adapter; `null` trains the whole model",
    )
    data: DataSection
    trainer: dict[str, Any] = Field(
        default={},
        description="fields of the stage's config in TRL, see [trainer keys](trainer.md)",
    )
    export: ExportSection = Field(
        default=ExportSection(), description="what is written after training"
    )
    evaluation: EvaluationSection | None = None
    numerics: NumericsSection = NumericsSection()
    parallel: ParallelSection = ParallelSection()
    rewards: list[RewardSection] = Field(
        default=[], description="of stage grpo: a name, or a mapping"
    )
    teacher: str | None = Field(default=None, description="folder or hub id")

    @field_validator("method", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        return value if isinstance(value, Method) else resolve_method(value)

    @field_validator("stage")
    @classmethod
    def _stage(cls, value: str) -> str:
        return STAGES[value].name

    @field_validator("trainer")
    @classmethod
    def _trainer(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        from moe_finetune.recipe.arguments import check_trainer

        stage = info.data.get("stage")  # not there when it is refused itself
        problems = list(check_trainer(value, STAGES[stage])) if value and stage else []
        if problems:
            raise RecipeError("\n".join(problems))
        return value

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        if self.stage == "pretrain":
            self.data = pretraining_data(self.data)
        problems = list(_contradictions(self))
        if problems:
            raise RecipeError("\n".join(problems))
        if self.model.family is not None:
            DECLARED[self.model.family.model_type] = self.model.family
        return self

    @classmethod
    def from_preset(cls, preset: str, model: str, train: Paths, **sections: Any) -> Recipe:
        """A recipe from a method's preset, a checkpoint and training data; the rest as keys.

        ``Recipe.from_preset("erc", "my/checkpoint", "my.jsonl", trainer={"max_steps": 50})``
        """
        values = {"model": {"path": model}, "method": {"preset": preset}, "data": {"train": train}}
        return recipe_from_tree(Tree(merge_mappings(values, sections)))

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved content, independent of the files it came from."""
        text = json.dumps(self.to_mapping(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def seed(self) -> int:
        """Seed of the run (``trainer.seed``, 42 when unset, as in transformers)."""
        return int(self.trainer.get("seed", 42))


def load_recipe(paths: Sequence[str | Path] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate recipe files (later ones win).

    Raises:
        RecipeError: one line for each problem, with the file, line and dotted key.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    return recipe_from_tree(load_tree(paths, overrides))


def recipe_from_tree(tree: Tree) -> Recipe:
    """Validate merged values; raise RecipeError that names where each problem was written."""
    return from_tree(Recipe, tree)


def pretraining_data(data: DataSection) -> DataSection:
    """``data`` as pretraining takes it where it says nothing else: texts, cut to rows, packed."""
    usual = {"format": "text", "packing": True, "packing_strategy": "bfd_split"}
    unset = {key: value for key, value in usual.items() if key not in data.model_fields_set}
    return DataSection.model_validate({**data.model_dump(exclude_unset=True), **unset})


def _unquantizable(recipe: Recipe) -> Iterator[str]:
    """Why the frozen weights of this run cannot be quantised."""
    key = f"model.quantization: '{recipe.model.quantization}'"
    if recipe.model.init == "random":
        yield f"{key} holds a checkpoint's weights; with model.init: random set it to none"
    elif recipe.lora is None:
        yield (
            f"{key} needs an adapter: quantised weights cannot be trained, and `lora: null` trains "
            "all; give a `lora:` section with a rank, or set model.quantization: none"
        )


def _unoffloadable(recipe: Recipe) -> Iterator[str]:
    """Why the experts of this run cannot wait in the host's memory."""
    if recipe.lora is None:
        yield (
            "model.offload: 'experts' needs an adapter: stacks that train must stay on the GPU; "
            "give a `lora:` section with a rank, or set model.offload: none"
        )
    if recipe.model.quantization != "none":
        yield (
            "model.offload: 'experts' does not go with model.quantization "
            f"'{recipe.model.quantization}', which it would undo; set one of them to none"
        )


def _unspreadable(recipe: Recipe) -> Iterator[str]:
    """Why the experts of this run cannot be spread over ranks."""
    key, lora, model = f"parallel.experts: {recipe.parallel.experts}", recipe.lora, recipe.model
    if lora is None or not (lora.targets or recipe.router.train != "full"):
        yield (
            f"{key} needs an adapter: the experts stay frozen on their ranks; give a `lora:` "
            "section with a rank and targets, or train all weights by FSDP2 "
            "(recipes/hardware/fsdp2_8gpu.yaml)"
        )
    if model.quantization != "none":
        yield (
            f"{key} does not go with model.quantization '{model.quantization}', whose weights "
            "cannot be divided; set one of them to its default"
        )
    if model.offload != "none":
        yield (
            f"{key} does not go with model.offload '{model.offload}'; spread experts take less of "
            "each GPU already; set one of them to its default"
        )
    for name in ("torch_compile", "fsdp", "deepspeed", "use_vllm"):
        if recipe.trainer.get(name):
            yield f"trainer.{name}: does not go with {key}; leave one of them out"


def _unstartable(recipe: Recipe, lora: LoraSection) -> Iterator[str]:
    """Why the adapter of this run cannot begin as ``lora.init`` and ``lora.use_dora`` ask."""
    others = {
        f"model.quantization '{recipe.model.quantization}'": recipe.model.quantization != "none",
        f"model.offload '{recipe.model.offload}'": recipe.model.offload != "none",
        f"parallel.experts: {recipe.parallel.experts}": recipe.parallel.experts != 1,
    }
    for other in (name for name, active in others.items() if active):
        if lora.changes_base or (lora.init == "orthogonal" and "parallel" in other):
            yield f"lora.init: '{lora.init}' does not go with {other}; set one to its default"
        if lora.loraplus_lr_ratio is not None and "parallel" in other:
            yield f"lora.loraplus_lr_ratio: does not go with {other}; leave one of them out"
        if lora.start is not None and ("parallel" in other or "offload" in other):
            yield f"lora.start: does not go with {other}; leave one of them out"
        if lora.use_dora:
            yield f"lora.use_dora: does not go with {other}; set one to its default"
    if lora.changes_base and recipe.stage not in ("sft", "pretrain"):
        yield (
            f"lora.init: '{lora.init}' changes the base's weights while it trains, and stage "
            f"{recipe.stage} needs them as the reference; use kaiming, gaussian or orthogonal"
        )


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Combinations that cannot run, one line each, starting with the key to change."""
    lora, router, data = recipe.lora, recipe.router.train, recipe.data
    if recipe.model.init == "random":
        if lora is not None:
            yield "lora: an adapter over random weights is useless; set lora: null"
        if router == "frozen":
            yield "router.train: 'frozen' would keep random routers; set it to full"
    elif recipe.model.config:
        yield "model.config: changes a model that is made anew; set model.init: random"
    if recipe.model.quantization != "none":
        yield from _unquantizable(recipe)
    if recipe.model.offload != "none":
        yield from _unoffloadable(recipe)
    if recipe.parallel.experts != 1:
        yield from _unspreadable(recipe)
    if lora is None:
        if router == "lora":
            yield "router.train: 'lora' needs a `lora:` section with a rank"
    else:
        yield from lora.problems(router)
        yield from _unstartable(recipe, lora)
    yield from _stage_contradictions(recipe)
    if data.columns and data.template:
        yield "data.template: cannot be combined with data.columns; keep one of them"
    if data.format == "text" and data.completion_only_loss:
        yield "data.completion_only_loss: true needs completions, and data.format is 'text'"
    if data.packing and data.packing_strategy != "bfd" and data.format not in ("text", "auto"):
        yield (
            f"data.packing_strategy: '{data.packing_strategy}' cuts examples apart and is for "
            f"data.format 'text'; wanted 'bfd' for '{data.format}'"
        )
    if data.validation is None:
        for key in ("eval_strategy", BEST):
            if recipe.trainer.get(key) not in (None, False, "no"):
                yield f"trainer.{key}: {recipe.trainer[key]!r} needs data.validation"
    if recipe.export.verify and not recipe.export.merge:
        yield "export.verify: true needs export.merge: true; there is nothing else to verify"
    if recipe.evaluation and not recipe.export.merge:
        yield "evaluation: needs export.merge: true, because the merged checkpoint is evaluated"
    if recipe.evaluation and recipe.evaluation.every and recipe.trainer.get(BEST):
        yield (
            f"evaluation.every: its curve ends with the last step, and trainer.{BEST} goes back to "
            "another; leave one of them out"
        )


def _routing_contradictions(recipe: Recipe) -> Iterator[str]:
    """Where a rollout's or a teacher's routing cannot be had."""
    stage = recipe.stage
    if "teacher_routing" in recipe.method.terms and stage != "distill":
        yield f"method.terms.teacher_routing: of stage distill, and this is stage {stage}"
    if not recipe.router.replay:
        return
    if stage != "grpo":
        yield f"router.replay: of stage grpo, and this is stage {stage}"
    for key in ("use_vllm", "use_transformers_continuous_batching"):
        if recipe.trainer.get(key):
            yield (
                f"router.replay: with trainer.{key} TRL does not get the experts of a rollout; "
                "leave that out, or set router.replay: false"
            )
    if recipe.method.perturbations.random_second_choice:
        yield (
            "router.replay: method.perturbations.random_second_choice draws experts at random, and "
            "a replay keeps those of the rollout; set one of them to false"
        )


def _stage_contradictions(recipe: Recipe) -> Iterator[str]:
    """What the stage and other keys disagree about."""
    stage, data = STAGES[recipe.stage], recipe.data
    if stage.name == "pretrain" and data.format != "text":
        yield f"data.format: '{data.format}' holds answers, but stage pretrain learns from text"
    if stage.form != "tokens":
        if data.packing:
            yield f"data.packing: stage {stage.name} does not pack; leave it out"
        if data.format != "auto":
            yield f"data.format: stage {stage.name} has a format of its own; leave it out"
    if recipe.rewards and stage.name != "grpo":
        yield f"rewards: only stage grpo has them, and this is stage {stage.name}"
    if stage.name == "grpo" and not recipe.rewards:
        yield (
            "rewards: required by stage grpo, but missing; name one (exact_match, boxed, code) or "
            "a file with a function of your own"
        )
    yield from _routing_contradictions(recipe)
    if (recipe.teacher is None) == (stage.name == "distill"):
        yield (
            "teacher: required by stage distill, but missing; name a checkpoint"
            if stage.name == "distill"
            else f"teacher: only stage distill has one, and this is stage {stage.name}"
        )
    if recipe.model.init == "random" and stage.name not in ("sft", "pretrain"):
        yield f"model.init: 'random' weights cannot begin with stage {stage.name}; pretrain first"
