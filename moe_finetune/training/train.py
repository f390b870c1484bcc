"""The training stage of a run: model, adapter, losses, checkpoints, routing before and after."""

import functools
import logging
from pathlib import Path
from typing import Any

from transformers import set_seed

from moe_finetune.io.run_folder import RunFolder
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.offload import offload_experts
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.callback import add_callbacks
from moe_finetune.training.continued_adapter import continue_adapter
from moe_finetune.training.keep_steps import KeepSteps
from moe_finetune.training.prepare import Inputs
from moe_finetune.training.resumable import find_checkpoint
from moe_finetune.training.sample import sample_examples, take_snapshot
from moe_finetune.training.save import name_base, run_metadata, save_trained
from moe_finetune.training.signals import StopOnSignal
from moe_finetune.training.start import Start, reference_model, start_model
from moe_finetune.training.trainer import build_trainer

log = logging.getLogger(__name__)


def train(recipe: Recipe, run: RunFolder, inputs: Inputs, resume: bool = False) -> None:
    """Fine-tune and write the adapter (or, without LoRA, the model) to the run folder."""
    start, output = inputs.start, run.path
    model = trainable_model(start)
    checkpoint = find_checkpoint(run.checkpoints) if resume else None
    trainer, callback = build_trainer(
        recipe,
        output,
        model,
        inputs.rendering,
        inputs.train,
        inputs.validation,
        functools.partial(reference_model, start),
        checkpoint,
    )
    if start.adapted:
        name_base(model, recipe)  # checkpoints name it, too
        callback.run_metadata = run_metadata(recipe, start.checkpoint)
    if inputs.validation is None:
        log.warning(
            "data.validation is not set: routing before and after is measured on training data"
        )
    sample = sample_examples(inputs.sources, recipe.data.max_length)
    take = functools.partial(
        take_snapshot,
        model,
        sample,
        tokenizer=start.tokenizer,
        data="train" if inputs.validation is None else "validation",
    )
    # All ranks take it, because the experts may be spread over them.
    if ranks.any_rank(ranks.rank() == 0 and not run.routing_before.exists()):
        take(run.routing_before)
    add_callbacks(trainer, KeepSteps(recipe, output, model, start.tokenizer, callback))
    if checkpoint:
        trainer.args.eval_on_start = False
    with StopOnSignal(output, can_save=getattr(trainer, "can_save", None)) as stop:
        add_callbacks(trainer, stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            callback.close()
    method = callback.specialization
    assert method is not None
    take(run.routing_after, perturbation=method.perturbation)
    metadata = callback.run_metadata
    save_trained(model, start.tokenizer, recipe, output, method.balancer, metadata)


def trainable_model(start: Start) -> Any:
    """The model with its adapter before training: new factors, or those of ``lora.start``."""
    recipe = start.recipe
    model = start_model(start)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    if start.checkpoint is not None and recipe.lora is not None and recipe.lora.start is not None:
        continue_adapter(model, Path(recipe.lora.start), start.checkpoint)
    if recipe.model.offload == "experts":
        offload_experts(model)
    log.debug("LoRA coverage\n%s", lora_coverage(model).table())
    return model
