"""A recipe on TRL's trainer for its stage: arguments, trainer, the run's log."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback

from moe_finetune.errors import RecipeError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.lora.targets import adapts
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import CHECKPOINTING, STAGES, Stage
from moe_finetune.training.callback.callback import SpecializationCallback, add_callbacks
from moe_finetune.training.callback.early_ends import FiniteTrainer
from moe_finetune.training.run.input_fingerprints import read_inputs
from moe_finetune.training.run_log import LiveTable, RunLog
from moe_finetune.training.save_and_resume.resumable_trainer import ResumableTrainer
from moe_finetune.training.save_and_resume.sharded_state import leave_experts
from moe_finetune.training.save_and_resume.state_files import (
    accumulation,
    random_state,
    set_random_state,
)
from moe_finetune.training.stages.generation_time import GenerationTime
from moe_finetune.training.stages.grpo_trainer import (
    PinsExperts,
    SavesBetweenGenerations,
    measured_from,
)
from moe_finetune.training.stages.reward_signal import NotesMissingSignal
from moe_finetune.training.stages.vllm_rollouts import engine_returns_experts

_Trainer: Any = object
log = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, output: Path) -> Any:
    """The stage's TRL config: the toolkit's defaults, then the recipe's ``trainer:`` keys."""
    config = STAGES[recipe.stage].config_class()
    evaluated = recipe.data.validation is not None
    cpu = not torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "logging_steps": 10,
        "report_to": ["tensorboard"],
        "gradient_checkpointing": not cpu,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": 1e-4,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluated else "no",
        "eval_steps": 100,
        # So that values that a run reports as measured before training are.
        "eval_on_start": evaluated and recipe.trainer.get("eval_strategy") not in (False, "no"),
        "bf16": recipe.model.dtype == "bfloat16",
        "use_cpu": cpu,
        "dataloader_pin_memory": not cpu,
        "logging_nan_inf_filter": False,
    }
    if STAGES[recipe.stage].form == "prompts":  # a whole group of completions for each prompt
        sizes = (recipe.trainer.get(key) for key in ("num_generations_eval", "num_generations"))
        defaults["per_device_eval_batch_size"] = next(filter(None, sizes), 8)
    ours: dict[str, Any] = {
        "output_dir": str(RunFolder(output).checkpoints),
        "max_length": recipe.data.max_length,
        "packing": recipe.data.packing,
        "packing_strategy": recipe.data.packing_strategy,
        # 0 turns off the balance loss that TRL would take from the checkpoint's config.
        "router_aux_loss_coef": 0.0,
        "seed": recipe.seed,
        # The fields that rewards read are not arguments of the model.
        "remove_unused_columns": False,
        "reward_weights": [section.weight for section in recipe.rewards],
    }
    field_names = {field.name for field in dataclasses.fields(config) if field.init}
    ours = {name: value for name, value in ours.items() if name in field_names}
    if STAGES[recipe.stage].form == "tokens":
        del ours["remove_unused_columns"]
    arguments = {**defaults, **recipe.trainer, **ours}
    new, old = CHECKPOINTING
    for suffix in ("", "_kwargs") if new in field_names else ():
        value = arguments.pop(f"{old}{suffix}", None)
        arguments.setdefault(f"{new}{suffix}", value)
    return on_one_device(config(**arguments))


def on_one_device(arguments: Any) -> Any:
    """Train on one GPU without a launcher: replicas of DataParallel run without our hooks."""
    if arguments.n_gpu > 1:
        log.warning(
            "%d GPUs are visible, and one process trains on only one of them; to use all, start "
            "with 'accelerate launch --config_file recipes/hardware/fsdp2_8gpu.yaml "
            "-m moe_finetune.cli train ...'",
            arguments.n_gpu,
        )
        arguments._n_gpu = 1
    return arguments


class RunTrainer(FiniteTrainer, ResumableTrainer):
    """Mixin with checkpoints that resume exactly, and an end at numbers that are not finite."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate without advancing the random state, so evaluations do not change training."""
        state = random_state()
        try:
            metrics = super().evaluate(*args, **kwargs)
        finally:
            set_random_state(state)
        best, name = self.args.metric_for_best_model, str(self.args.metric_for_best_model)
        if best is not None and f"eval_{name.removeprefix('eval_')}" not in metrics:
            raise RecipeError(
                f"trainer.metric_for_best_model: '{best}' is not a result of the evaluation; "
                f"known: {', '.join(sorted(metrics))}"
            )
        return metrics


class TakesPreparedRows:
    """Mixin for DPO: its rows were prepared by the same function when they were counted."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset


@functools.cache
def trainer_of(stage: Stage) -> Any:
    """TRL's trainer class for ``stage`` with the run's mixins."""
    base = stage.trainer_class()
    mixins: tuple[type, ...] = (RunTrainer,)
    if stage.name == "grpo":  # a save that waits is not logged as one
        mixins = (SavesBetweenGenerations, RunTrainer, NotesMissingSignal, PinsExperts)
    if stage.name == "dpo":
        mixins = (RunTrainer, TakesPreparedRows)
    return type(f"Run{base.__name__}", (*mixins, base), {"__doc__": RunTrainer.__doc__})


def build_trainer(
    recipe: Recipe,
    output: Path,
    model: Any,
    tokenizer: Tokenizer,
    train: Any,
    validation: Any,
    reference: Callable[[], Any] | None = None,
    checkpoint: Path | None = None,
) -> tuple[RunTrainer, SpecializationCallback]:
    """Build TRL's trainer with the method's callback attached, the run's log and its guards.

    ``reference``: makes the reference model of a stage that needs one and has no adapter to
    disable; ``checkpoint``: that training will resume from.
    """
    callback = SpecializationCallback(
        recipe.method,
        dropout=recipe.lora.dropout if recipe.lora else 0.0,
        kernel=recipe.model.experts_kernel,
    )
    callback.routing_file = RunFolder(output).routing_steps
    stage = STAGES[recipe.stage]
    with ExitStack() as built:
        if recipe.router.replay == "rollout":
            built.enter_context(engine_returns_experts())
        if stage.name == "grpo" and reference is not None:
            built.enter_context(measured_from(reference))
        trainer = trainer_of(stage)(
            model=model,
            args=_arguments_from(checkpoint, recipe, output),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            **_stage_arguments(recipe, train.column_names, reference, tokenizer, model),
        )
    trainer.run_id = read_inputs(RunFolder(output)).get("run")
    for printer in (ProgressCallback, PrinterCallback):  # LiveTable shows what they would print
        trainer.remove_callback(printer)
    leave_experts(trainer)
    callback.attach(trainer)
    if isinstance(trainer, PinsExperts):
        trainer.replay_from(recipe, callback)
    if stage.name == "grpo":
        add_callbacks(trainer, GenerationTime())
    add_callbacks(trainer, RunLog(output, "logging_steps" not in recipe.trainer), LiveTable())
    return trainer, callback


def _arguments_from(checkpoint: Path | None, recipe: Recipe, output: Path) -> Any:
    """:func:`training_arguments` with the checkpoint's number of rows per step."""
    args = training_arguments(recipe, output)
    if checkpoint is None:
        return args
    steps = accumulation(checkpoint, args)
    if steps == args.gradient_accumulation_steps:
        return args
    log.warning(
        "resuming with %d processes: gradient_accumulation_steps is set to %d, so each step "
        "takes as many rows as before",
        args.world_size,
        steps,
    )
    trainer = {**recipe.trainer, "gradient_accumulation_steps": steps}
    return training_arguments(recipe.model_copy(update={"trainer": trainer}), output)


def _stage_arguments(
    recipe: Recipe,
    columns: list[str],
    reference: Callable[[], Any] | None,
    tokenizer: Tokenizer,
    model: Any,
) -> dict[str, Any]:
    """A stage's trainer arguments in addition to model, arguments and data."""
    from moe_finetune.training.stages.rewards import reward_functions

    if recipe.rewards:
        variables = recipe.trainer.get("chat_template_kwargs")
        ends = model.generation_config.eos_token_id
        functions = reward_functions(recipe.rewards, columns, tokenizer, variables, ends)
        return {"reward_funcs": functions}
    adapted = adapts(recipe.lora, recipe.router.train)
    if reference is not None and STAGES[recipe.stage].reference and not adapted:
        return {"ref_model": reference()}
    return {}
