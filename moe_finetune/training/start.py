"""The start of a run: its checkpoint and tokenizer, opened once, and the models built from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.models import Family


def base_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's checkpoint, at its revision if it is on the hub."""
    from moe_finetune.models.loading import local_folder

    weights = recipe.model.init == "checkpoint"
    return local_folder(recipe.model.path, weights, recipe.model.revision)


@dataclass(frozen=True)
class Start:
    """The start of training, opened once and used for checks, model, plan and metadata.

    Attributes:
        folder: the base checkpoint's folder.
        config: transformers' config of the trained model.
        family: the family of ``config``.
        tokenizer: as its files define it; saved with the trained weights.
        checkpoint: the base's tensors by name; None for random weights.
    """

    recipe: Recipe
    folder: Path
    config: Any
    family: Family
    tokenizer: Any
    checkpoint: Checkpoint | None

    @property
    def base(self) -> Path | Checkpoint:
        """The opened base if its weights are used, else its folder."""
        return self.folder if self.checkpoint is None else self.checkpoint

    @property
    def expert_ranks(self) -> int:
        return expert_ranks(self.recipe)

    @property
    def adapted(self) -> bool:
        """Whether an adapter trains instead of the model's own weights."""
        from moe_finetune.lora.targets import adapts

        return adapts(self.recipe.lora, self.recipe.router.train)


def open_start(recipe: Recipe) -> Start:
    """Open the recipe's checkpoint and tokenizer; read and check every tensor.

    Raises:
        CheckpointError, UnsupportedModelError: see
            :func:`~moe_finetune.checkpoint.open.open_checkpoint`.
        RecipeError: ``model.config`` does not fit the checkpoint's.
    """
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models import check_supported
    from moe_finetune.models.fresh import check_vocabulary, fresh_config
    from moe_finetune.models.loading import load_tokenizer

    folder = base_folder(recipe)
    tokenizer_path = recipe.model.tokenizer or folder
    if recipe.model.init == "random":
        config, family = fresh_config(folder, recipe.model.config)
        tokenizer = load_tokenizer(tokenizer_path)
        check_vocabulary(config, tokenizer, tokenizer_path)
        return Start(recipe, folder, config, family, tokenizer, None)
    checkpoint = open_checkpoint(folder, values=True, stored=True)
    config = checkpoint.model_config
    check_supported(config, checkpoint.family)
    tokenizer = load_tokenizer(tokenizer_path)
    return Start(recipe, folder, config, checkpoint.family, tokenizer, checkpoint)


def start_model(start: Start) -> Any:
    """The model that training starts from, with the checkpoint's weights or random ones.

    Without LoRA all weights train in float32, because updates at usual learning rates are below the
    resolution of bfloat16; the trainer then computes in ``model.dtype``.
    """
    from moe_finetune.checkpoint.load import load_model
    from moe_finetune.models import opened_as
    from moe_finetune.models.fresh import fresh_model

    recipe, attention = start.recipe, start.recipe.model.attn_implementation
    if start.checkpoint is None:
        return opened_as(start.family, fresh_model(start.config, recipe.seed, attention))
    return load_model(
        start.checkpoint,
        dtype=recipe.model.dtype if recipe.lora is not None else "float32",
        quantization=recipe.model.quantization,
        expert_ranks=start.expert_ranks,
        attn_implementation=attention,
    )


def expert_ranks(recipe: Recipe) -> int:
    """Number of ranks that share the experts of the recipe's model."""
    from moe_finetune.training import ranks

    spread = recipe.parallel.experts
    return ranks.world_size() if spread == "all" else spread


def reference_model(start: Start) -> Any:
    """The reference of a preference stage."""
    return start_model(start).requires_grad_(False)
