"""Strength of a recipe's losses on the window that its training begins with."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.measure_strength import measure_strength


def strength_of(checkpoint: str, recipe: Recipe) -> list[dict[str, Any]]:
    """Strength of the recipe's losses on ``checkpoint`` and the window its training begins with.

    Model, adapter, seed and the order of the data are the run's; nothing is trained or kept. With
    several processes the run's window is larger: this is one process's part of it.

    Raises:
        RecipeError: the recipe has no losses, or does not fit the checkpoint.
        ObjectiveError: a term reaches nothing trainable; a share without a gradient.
    """
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.training.start import check_inputs, start_model
    from moe_finetune.training.trainer import build_trainer

    if STAGES[recipe.stage].form != "tokens":
        raise RecipeError(
            f"--strength: measured beforehand for stages sft and pretrain; stage {recipe.stage} "
            "logs it at its first step"
        )
    model_section = recipe.model.model_copy(update={"path": checkpoint})
    recipe = recipe.model_copy(update={"model": model_section, "evaluation": None})
    if not recipe.method.terms:
        raise RecipeError("--strength: the recipe's method has no losses to measure")
    inputs = check_inputs(recipe)
    model: Any = start_model(recipe)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    with tempfile.TemporaryDirectory() as folder:
        trainer, callback = build_trainer(
            recipe, Path(folder), model, inputs.tokenizer, inputs.train, None
        )
        model.to(trainer.args.device)
        loader = trainer.get_train_dataloader()
        window = list(itertools.islice(loader, trainer.args.gradient_accumulation_steps))
    batches = [{k: v for k, v in batch.items() if torch.is_tensor(v)} for batch in window]
    with trainer.compute_loss_context_manager():
        return measure_strength(model, callback.method, batches)
