"""One training of an upcycle, from a checkpoint to a checkpoint.

Training uses the toolkit's resumable TRL trainer. Its checkpoints and log stay in a work folder
while it runs, so that a killed training resumes; the output folder appears when it is done.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from moe_finetune.io import write_atomic
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.method import Method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection, ModelSection

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

# Fifty logs per training are enough points for its curve.
_QUIET = {"report_to": [], "logging_steps": 0.02, "save_strategy": "steps", "save_steps": 200}


@dataclass(frozen=True)
class Job:
    """One training's start, rows and options.

    ``rows`` have ``input_ids`` of equal length, all of them learned. Without a ``method`` a dense
    model is trained; with ``routers_only`` only the method's losses are computed, and logged.
    """

    start: Path
    rows: Dataset
    trainer: dict[str, Any]
    seed: int
    dtype: str
    method: Method | None = None
    routers_only: bool = False
    router_learning_rate: float | None = None

    @property
    def recipe(self) -> Recipe:
        """This training as an ordinary recipe."""
        routers = LoraSection(rank=1, targets=[])  # an adapter of nothing, with the routers
        return Recipe(
            model=ModelSection(path=str(self.start), dtype=self.dtype),  # type: ignore[arg-type]
            method=self.method or Method(),
            lora=routers if self.routers_only else None,
            data=DataSection(train="rows", max_length=len(self.rows[0]["input_ids"])),
            trainer={**_QUIET, **self.trainer, "seed": self.seed},
        )


def run_job(job: Job, work_folder: Path, output: Path, curve: Path | None = None) -> None:
    """Train, or resume from the work folder's checkpoint, and write ``output``; the log is copied
    to ``curve`` before that appears.
    """
    from transformers import set_seed

    from moe_finetune.checkpoint.load_model import load_model
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models.config_and_tokenizer import load_tokenizer
    from moe_finetune.training.callback.callback import add_callbacks
    from moe_finetune.training.callback.early_ends import StopOnSignal
    from moe_finetune.training.save_and_resume.resumable_trainer import find_checkpoint
    from moe_finetune.training.save_and_resume.save_trained import save_trained
    from moe_finetune.upcycle.dense_parents import load_dense

    recipe = job.recipe
    tokenizer = load_tokenizer(job.start)
    set_seed(job.seed)
    # Updates at usual learning rates are below the resolution of bfloat16: fully trained weights
    # are float32 here, compute in the recipe's dtype, and are stored in it.
    dtype = job.dtype if job.routers_only else "float32"
    model: nn.Module
    if job.method is None:
        model = load_dense(job.start, dtype).requires_grad_(True)
    else:
        model = add_lora(load_model(job.start, dtype), recipe.lora, "full")
    work_folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(work_folder)
    for weights in (run.adapter, run.merged):
        shutil.rmtree(weights, ignore_errors=True)
    begun = run.checkpoints.is_dir()
    trainer, close = build(job, recipe, model, tokenizer, work_folder)
    checkpoint = find_checkpoint(run.checkpoints) if begun else None
    with StopOnSignal(work_folder, "repeat the command with --resume") as stop:
        add_callbacks(trainer, stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            close()
    saved = save_trained(model, tokenizer, recipe, work_folder)
    if curve is not None and run.metrics.is_file():
        write_atomic(curve, run.metrics.read_bytes())
    output.parent.mkdir(parents=True, exist_ok=True)
    if saved == run.adapter:
        from moe_finetune.checkpoint.merge import merge_adapter

        merge_adapter(job.start, saved, output)
    else:
        saved.rename(output)


def build(
    job: Job, recipe: Recipe, model: nn.Module, tokenizer: Tokenizer, work_folder: Path
) -> tuple[Any, Any]:
    """Return TRL's trainer for this job, and a function that removes the method from the model."""
    import torch

    from moe_finetune.losses.inject import CollectedLosses
    from moe_finetune.moe.layers import backbone_of, moe_layers
    from moe_finetune.recipe.stages import STAGES
    from moe_finetune.training.callback.callback import SpecializationCallback, add_callbacks
    from moe_finetune.training.run.trainer import trainer_of, training_arguments
    from moe_finetune.training.run_log import RunLog

    plain: Any = trainer_of(STAGES["sft"])

    class ArmTrainer(plain):
        """Trains routers with a learning rate of their own."""

        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            if job.router_learning_rate is not None:
                layers = moe_layers(self.model)
                routers = {id(weight) for each in layers for weight in each.router.parameters()}
                _split_groups(optimizer, routers, job.router_learning_rate)
            return optimizer

    class RouterTrainer(plain):
        """Trains on only the method's losses, without the head and the language model's loss.

        The layers' losses are summed, so that the backward starts at them and skips everything
        above: the last layer's experts, the norm and the head.
        """

        def compute_loss(
            self,
            model: nn.Module,
            inputs: Any,
            return_outputs: Any = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            recorder = callback.specialization.recorder  # type: ignore[union-attr]
            collected = CollectedLosses()
            with recorder.using(joins=collected), self.accelerator.autocast():
                backbone_of(model)(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs.get("attention_mask"),
                    use_cache=False,
                )
            loss = torch.stack(collected.losses).sum()
            # The trainer itself divides by the accumulation window if it counts no items.
            return loss if num_items_in_batch is None else loss * recorder.plan.scale()

    arguments = training_arguments(recipe, work_folder)
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # rows already have their length
    trainer = (RouterTrainer if job.routers_only else ArmTrainer)(
        model=model,  # type: ignore[arg-type]
        args=arguments,
        train_dataset=job.rows,
        processing_class=tokenizer,
    )
    callback = SpecializationCallback(recipe.method, kernel=recipe.model.experts_kernel)
    if job.method is not None:
        callback.attach(trainer)
    add_callbacks(trainer, RunLog(work_folder))
    return trainer, callback.close


def _split_groups(optimizer: Any, apart: set[int], learning_rate: float) -> None:
    """Move the parameters whose id is in ``apart`` to groups with ``learning_rate``."""
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in apart]
        if moved:
            group["params"] = [weight for weight in group["params"] if id(weight) not in apart]
            optimizer.add_param_group({**group, "params": moved, "lr": learning_rate})
