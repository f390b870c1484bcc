"""The weights that a run found for shares, noted in its resolved recipe."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerCallback

from moe_finetune.io import write_atomic
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.callback import SpecializationCallback


class FoundWeights(TrainerCallback):
    """Writes the weights that were found for shares into the run's resolved recipe.

    A recipe read back from there is equal to the one that was given: beside a share, a weight is a
    note.

    Args:
        path: its resolved copy; nothing is written where there is none.
    """

    def __init__(self, recipe: Recipe, path: Path, callback: SpecializationCallback):
        self.recipe = recipe
        self.path = path
        self.callback = callback
        self._written: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
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
