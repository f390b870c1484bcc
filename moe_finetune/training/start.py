"""Where a run starts: its checkpoint and tokenizer, opened once, and the models made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from moe_finetune.checkpoint.contents import Checkpoint
    from moe_finetune.models import Family


def base_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's checkpoint, at its revision where it is one of the hub's."""
    from moe_finetune.models.loading import local_folder

    weights = recipe.model.init == "checkpoint"
    return local_folder(recipe.model.path, weights, recipe.model.revision)


@dataclass(frozen=True)
class Start:
    """What training starts from, opened once; checks, model, plan and metadata take it.

    Attributes:
        folder: the base's.
        config: transformers' config of the model that trains.
        family: the config's.
        tokenizer: as its files define it; it is saved with what was trained.
        checkpoint: the base's tensors by name; None where weights are random.
    """

    recipe: Recipe
    folder: Path
    config: Any
    family: Family
    tokenizer: Any
    checkpoint: Checkpoint | None

    @property
    def base(self) -> Path | Checkpoint:
        """The base as verbs take it: open where its weights are used."""
        return self.folder if self.checkpoint is None else self.checkpoint

    @property
    def expert_ranks(self) -> int:
        return expert_ranks(self.recipe)

    @property
    def adapted(self) -> bool:
        """Whether an adapter trains, and not the model's own weights."""
        from moe_finetune.lora.targets import adapts

        return adapts(self.recipe.lora, self.recipe.router.train)

    @cached_property
    def teacher_config(self) -> Any:
        """transformers' config of the recipe's teacher; None without one."""
        from moe_finetune.models.loading import load_config

        return None if self.recipe.teacher is None else load_config(self.recipe.teacher)


def open_start(recipe: Recipe) -> Start:
    """Open the recipe's checkpoint and tokenizer; every tensor is read and checked.

    Raises:
        CheckpointError, UnsupportedModelError: see
            :func:`~moe_finetune.checkpoint.opened.open_checkpoint`.
        RecipeError: ``model.config`` does not fit the checkpoint's.
    """
    from moe_finetune.checkpoint.opened import open_checkpoint
    from moe_finetune.models import family_of
    from moe_finetune.models.fresh import check_vocabulary, fresh_config
    from moe_finetune.models.loading import load_tokenizer

    folder = base_folder(recipe)
    tokenizer_path = recipe.model.tokenizer or folder
    if recipe.model.init == "random":
        config = fresh_config(folder, recipe.model.config)
        tokenizer = load_tokenizer(tokenizer_path)
        check_vocabulary(config, tokenizer, tokenizer_path)
        return Start(recipe, folder, config, family_of(config), tokenizer, None)
    checkpoint = open_checkpoint(folder, values=True, stored=True)
    tokenizer = load_tokenizer(tokenizer_path)
    config = checkpoint.model_config
    return Start(recipe, folder, config, checkpoint.family, tokenizer, checkpoint)


def start_model(start: Start) -> Any:
    """The model that training starts from: the checkpoint's weights, or random ones.

    Without LoRA all weights train, and are float32 whatever ``model.dtype`` is (the trainer then
    computes in that): updates at usual learning rates are below the resolution of bfloat16.
    """
    from moe_finetune.checkpoint.loading import load_model
    from moe_finetune.models.fresh import fresh_model

    recipe, attention = start.recipe, start.recipe.model.attn_implementation
    if start.checkpoint is None:
        return fresh_model(start.config, recipe.seed, attention)
    return load_model(
        start.checkpoint,
        dtype=recipe.model.dtype if recipe.lora is not None else "float32",
        quantization=recipe.model.quantization,
        expert_ranks=start.expert_ranks,
        attn_implementation=attention,
    )


def expert_ranks(recipe: Recipe) -> int:
    """How many ranks together hold all experts of the recipe's model."""
    from moe_finetune.training import ranks

    spread = recipe.parallel.experts
    return ranks.world_size() if spread == "all" else spread


def second_model(start: Start) -> Any:
    """The teacher of a distillation, or the model that a preference is measured from."""
    from moe_finetune.checkpoint.loading import load_model

    recipe = start.recipe
    if recipe.teacher is None:
        return start_model(start).requires_grad_(False)
    return load_model(recipe.teacher, dtype=recipe.model.dtype).requires_grad_(False)
