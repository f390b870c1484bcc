"""The training stage of a run: model, adapter, losses, checkpoints, routing before and after."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from moe_finetune.errors import DiskSpaceError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.callback import add_callbacks
from moe_finetune.training.resumable import find_checkpoint
from moe_finetune.training.sample import sample_examples, take_snapshot
from moe_finetune.training.save import name_base, run_metadata, save_trained
from moe_finetune.training.signals import StopOnSignal
from moe_finetune.training.start import start_model, trainable_model
from moe_finetune.training.trainer import build_trainer

if TYPE_CHECKING:
    from moe_finetune.training.prepare import Inputs

log = logging.getLogger(__name__)


def train(recipe: Recipe, run: RunFolder, inputs: Inputs, resume: bool = False) -> None:
    """Fine-tune and write the adapter (or, without LoRA, the model) to the run folder."""
    start = inputs.start
    model = trainable_model(start)
    checkpoint = find_checkpoint(run.checkpoints) if resume else None
    trainer, callback = build_trainer(
        recipe,
        run.path,
        model,
        inputs.rendering,
        inputs.train,
        inputs.validation,
        lambda: start_model(start).requires_grad_(False),
        checkpoint,
    )
    if start.adapted:
        name_base(model, recipe)  # checkpoints name it, too
        callback.run_metadata = run_metadata(recipe, start.checkpoint)
    if inputs.validation is None:
        log.warning(
            "data.validation is not set: routing before and after is measured on training data"
        )
    take = functools.partial(
        take_snapshot,
        model,
        sample_examples(inputs.sources, recipe.data.max_length),
        tokenizer=start.tokenizer,
        data="train" if inputs.validation is None else "validation",
    )
    # All ranks take it, because the experts may be spread over them.
    if ranks.any_rank(ranks.rank() == 0 and not run.routing_before.exists()):
        take(run.routing_before)

    def save(folder: RunFolder) -> None:
        method = callback.specialization
        assert method is not None
        metadata = callback.run_metadata
        save_trained(model, start.tokenizer, recipe, folder.path, method.balancer, metadata)

    add_callbacks(trainer, KeepSteps(recipe, run, save))
    if checkpoint:
        trainer.args.eval_on_start = False
    with StopOnSignal(run.path, can_save=getattr(trainer, "can_save", None)) as stop:
        add_callbacks(trainer, stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            callback.close()
    assert callback.specialization is not None
    take(run.routing_after, perturbation=callback.specialization.perturbation)
    save(run)


class KeepSteps(TrainerCallback):
    """Saves the trained model, as at the end of a run, every ``evaluation.every`` steps.

    The run itself saves the last step. Training checkpoints are no substitute: sharded ones cannot
    be opened, and old ones are deleted.

    Args:
        save: writes the model into a folder; every rank calls it.
    """

    def __init__(self, recipe: Recipe, run: RunFolder, save: Any):
        self.every = recipe.evaluation and recipe.evaluation.every
        self.run, self.save = run, save

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if not self.every or step % self.every or step >= state.max_steps:
            return
        folder = self.run.step(step)
        # A resumed run passes steps that it saved before; only rank 0 writes.
        if ranks.any_rank(ranks.rank() == 0 and folder.trained):
            return
        try:
            self.save(folder)
        except (DiskSpaceError, OSError) as problem:  # of rank 0, for whom the others wait
            ranks.barrier()
            log.warning(
                "WARNING: the model after step %d could not be kept and will not be scored (%s)",
                step,
                problem,
            )
