"""The losses' strength in a recipe's run: weights noted while it trains; measured without it."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from moe_finetune.errors import RecipeError
from moe_finetune.io import write_atomic
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.callback import SpecializationCallback
from moe_finetune.training.strength import measure_strength


class FoundWeights(TrainerCallback):
    """Writes the weights that were found for shares into the run's resolved recipe.

    A recipe read back from there is equal to the one that was given: beside a share, a weight is a
    note.

    Args:
        recipe: the run's.
        path: its resolved copy; nothing is written where there is none.
        callback: the method's.
    """

    def __init__(self, recipe: Recipe, path: Path, callback: SpecializationCallback):
        self.recipe = recipe
        self.path = path
        self.callback = callback
        self._written: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):  # noqa: D102
        work = self.callback.specialization
        if work is None or not state.is_world_process_zero or not self.path.exists():
            return
        found = {
            term.name: weight
            for term in work.objective.terms
            if term.options.share is not None
            and (weight := work.objective.full_weights[term.name]) is not None
        }
        if found != self._written:
            self._written = found
            write_atomic(self.path, with_weights(self.recipe, found).to_yaml())


def with_weights(recipe: Recipe, weights: dict[str, float]) -> Recipe:
    """``recipe`` with these weights noted beside the shares that they were found for."""
    terms = {
        name: options.model_copy(update={"weight": weights[name]}) if name in weights else options
        for name, options in recipe.method.terms.items()
    }
    method = recipe.method.model_copy(update={"terms": terms})
    return recipe.model_copy(update={"method": method})


def strength_of(checkpoint: str, recipe: Recipe) -> list[dict[str, Any]]:
    """Strength of the recipe's losses on ``checkpoint`` and the window its training begins with.

    Model, adapter, seed and the order of the data are the run's; nothing is trained or kept. With
    several processes the run's window is larger: this is one process's part of it.

    Raises:
        RecipeError: the recipe has no losses, or does not fit the checkpoint.
        ObjectiveError: a term reaches nothing trainable; a share without a gradient.
    """
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.run import check_inputs, start_model
    from moe_finetune.training.sft import build_trainer

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
