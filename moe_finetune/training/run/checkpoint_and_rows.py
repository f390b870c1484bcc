"""The start of a run: its checkpoint and tokenizer, opened once; its rows and what it needs."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.load_model import forget_generation_defaults, load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.data.tokenize import run_tokenizer
from moe_finetune.io.counted import counted
from moe_finetune.io.folder import check_space
from moe_finetune.lora.targets import adapts
from moe_finetune.models import check_supported, opened_as
from moe_finetune.models.config_and_tokenizer import local_folder
from moe_finetune.models.from_scratch import check_vocabulary, fresh_config, fresh_model
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.plan import GIB, MemoryPlan, machine_bytes, state_bytes
from moe_finetune.training.refuse_launch import expert_ranks
from moe_finetune.training.run.step_count import (
    check_batches,
    checkpoints_at_once,
    count_steps,
    describe_steps,
)
from moe_finetune.training.run_log import FEW_STEPS, logged_every

if TYPE_CHECKING:
    from datasets import Dataset

    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.data.load_rows import Examples
    from moe_finetune.io.run_folder import RunFolder
    from moe_finetune.lora.coverage import Coverage
    from moe_finetune.models import Family

log = logging.getLogger(__name__)


def base_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's checkpoint, at its revision if it is on the hub."""
    weights = recipe.model.init == "checkpoint"
    return local_folder(recipe.model.path, weights, recipe.model.revision)


@dataclass(frozen=True)
class Start:
    """The start of training, opened once and used for checks, model, plan and metadata.

    ``checkpoint``: the base's tensors by name; None for random weights.
    """

    recipe: Recipe
    folder: Path
    config: Any
    family: Family
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None

    @property
    def base(self) -> Path | Checkpoint:
        """The opened base if its weights are used, else its folder."""
        return self.folder if self.checkpoint is None else self.checkpoint

    @property
    def adapted(self) -> bool:
        """Whether an adapter trains instead of the model's own weights."""
        return adapts(self.recipe.lora, self.recipe.router.train)


def open_start(recipe: Recipe) -> Start:
    """Open the recipe's checkpoint and tokenizer; read and check every tensor."""
    folder = base_folder(recipe)
    if recipe.model.init == "random":
        config, family = fresh_config(folder, recipe.model.config)
        tokenizer = run_tokenizer(recipe, folder)
        check_vocabulary(config, tokenizer, recipe.model.tokenizer or folder)
        return Start(
            recipe=recipe,
            folder=folder,
            config=config,
            family=family,
            tokenizer=tokenizer,
            checkpoint=None,
        )
    checkpoint = open_checkpoint(folder, values=True, stored=True)
    config = checkpoint.model_config
    check_supported(config, checkpoint.family)
    tokenizer = run_tokenizer(recipe, folder)
    return Start(
        recipe=recipe,
        folder=folder,
        config=config,
        family=checkpoint.family,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
    )


def start_model(start: Start) -> Any:
    """The model that training starts from, with the checkpoint's weights or random ones.

    Without LoRA all weights train in float32, because updates at usual learning rates are below the
    resolution of bfloat16; the trainer then computes in ``model.dtype``.
    """
    recipe, attention = start.recipe, start.recipe.model.attn_implementation
    if start.checkpoint is None:
        return opened_as(start.family, fresh_model(start.config, recipe.seed, attention))
    model = load_model(
        start.checkpoint,
        dtype=recipe.model.dtype if recipe.lora is not None else "float32",
        quantization=recipe.model.quantization,
        expert_ranks=expert_ranks(recipe),
        attn_implementation=attention,
    )
    if not start.adapted:
        keep_writable(model, start.tokenizer)
    return model


def keep_writable(model: Any, tokenizer: Tokenizer) -> None:
    """Drop generation defaults that transformers reads but would refuse to save with the weights.

    Exports have the base's own file.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.generation_config.save_pretrained(folder)
    except ValueError:
        forget_generation_defaults(model, tokenizer.pad_token_id)


@dataclass(frozen=True)
class Inputs:
    """The inputs of training, read before anything is written, and what it needs.

    ``fixed``: bytes that do not depend on the batch; ``memory``: the plan of a step on the longest
    rows, unless several GPUs share the model.
    """

    start: Start
    rows: Examples
    arguments: Any
    coverage: Coverage
    fixed: int
    memory: MemoryPlan | None = None

    @property
    def train(self) -> Dataset:
        return self.rows.train

    @property
    def validation(self) -> Dataset | None:
        return self.rows.validation

    @property
    def tokens(self) -> int | None:
        """Tokens of the training rows; None if the stage's trainer tokenizes."""
        if "input_ids" not in self.train.column_names:
            return None
        return self.rows.lengths.train.tokens

    @property
    def steps(self) -> int:
        """Optimizer steps; approximate for packed rows."""
        rows, tokens = len(self.train), self.tokens or 0
        return count_steps(self.start.recipe, self.arguments, rows, tokens)[1]

    def text(self) -> str:
        """What ``--dry-run`` prints."""
        recipe, tokens = self.start.recipe, self.tokens
        batch, steps = count_steps(recipe, self.arguments, len(self.train), tokens or 0)
        terms = f" ({', '.join(recipe.method.terms)})" if recipe.method.terms else ""
        length = "" if tokens is None else f", {counted(tokens, 'token')}"
        packed, about = (", packed", "about ") if recipe.data.packing else ("", "")
        evaluation = "none" if recipe.evaluation is None else recipe.evaluation.suite
        if recipe.evaluation is not None and recipe.evaluation.base:
            evaluation += "; then of the base, once for all runs that start from it"
        return "\n".join(
            [
                self.coverage.table(),
                "",
                *(self.memory.lines() if self.memory is not None else []),
                f"  {'machine':<12} {machine_bytes() / GIB:8.2f} GiB",
                "",
                f"stage          {recipe.stage}",
                f"method         {recipe.method.preset or 'no preset'}{terms}",
                f"training data  {counted(len(self.train), 'row')}{length}{packed}",
                "validation     "
                + ("none" if self.validation is None else counted(len(self.validation), "row")),
                f"steps          {about}{steps:,}, of {counted(batch, 'sequence')}",
                f"evaluation     {evaluation}",
            ]
        )

    def check_disk(self, run: RunFolder) -> None:
        """Refuse a run whose adapter, checkpoints and merged weights do not fit on the disk."""
        recipe = self.start.recipe
        base = self.start.checkpoint
        merged = 0
        if recipe.export.merge and self.start.adapted and base is not None:
            merged = sum(info.size for info in base.tensors.values())
        trained = self.coverage.total.trained_parameters
        checkpoint = 4 * trained + state_bytes(recipe, trained)
        if recipe.trainer.get("sync_ref_model"):
            checkpoint += 4 * trained  # the reference, which follows the policy
        count = checkpoints_at_once(recipe.trainer, self.steps)
        check_space(run.adapter, 4 * trained + count * checkpoint + merged)


# -- the size of the run --------------------------------------------------------------------------


def announce(inputs: Inputs) -> None:
    """Log the run's steps and memory, and settings that have no effect in a run of its length."""
    recipe = inputs.start.recipe
    arguments = inputs.arguments
    steps = inputs.steps
    check_batches(recipe, arguments, len(inputs.train), inputs.tokens or 0)
    if recipe.trainer.get("save_only_model"):
        log.warning(
            "trainer.save_only_model: checkpoints have no optimizer, so --resume cannot continue "
            "this run"
        )
    log.info("%s", describe_steps(recipe, arguments, len(inputs.train), inputs.tokens))
    needs = f"{inputs.fixed / GIB:.2f} GiB for weights, adapter and optimizer"
    if inputs.memory is not None:
        memory = inputs.memory
        needs = f"{memory.total / GIB:.2f} GiB, without libraries ({memory.moment}: {memory.batch})"
    log.info("predicted peak memory: %s; this machine has %.1f GiB", needs, machine_bytes() / GIB)
    usual = steps < FEW_STEPS and "logging_steps" not in recipe.trainer
    too_few = arguments.logging_strategy == "steps" and arguments.logging_steps > steps
    if too_few and not usual:
        interval = logged_every(steps)
        log.warning(
            "trainer.logging_steps %g is more than the run's %s; the run logs %s instead",
            arguments.logging_steps,
            counted(steps, "step"),
            "every step" if interval == 1 else f"every {interval} steps",
        )
    validated = inputs.validation is not None and arguments.eval_strategy == "steps"
    if validated and "eval_steps" in recipe.trainer and arguments.eval_steps > steps:
        log.warning(
            "trainer.eval_steps %g is more than the run's %s; data.validation is evaluated "
            "only %safter the last",
            arguments.eval_steps,
            counted(steps, "step"),
            "before the first step and " if arguments.eval_on_start else "",
        )
    if recipe.data.packing and recipe.data.packing_strategy == "wrapped":
        log.warning(
            "data.packing_strategy 'wrapped' cuts one stream of texts into rows whose texts "
            "attend to each other; 'bfd_split' keeps them separate"
        )
    scored_every = None if recipe.evaluation is None else recipe.evaluation.every
    if scored_every is not None and scored_every >= steps:
        log.warning(
            "evaluation.every %d is not less than the run's %s; the run is scored only at its end",
            scored_every,
            counted(steps, "step"),
        )
