"""Where a run starts: its model, and what can be found wrong before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import DataError, RecipeError, UnsupportedModelError
from moe_finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from moe_finetune.training.rehearsal import Plan

log = logging.getLogger(__name__)


def base_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's checkpoint, at its revision where it is one of the hub's."""
    from moe_finetune.models.loading import local_folder

    weights = recipe.model.init == "checkpoint"
    return local_folder(recipe.model.path, weights, recipe.model.revision)


def start_model(recipe: Recipe) -> Any:
    """The model that training starts from: the checkpoint's weights, or random ones.

    Without LoRA all weights train, and are float32 whatever ``model.dtype`` is (the trainer then
    computes in that): updates at usual learning rates are below the resolution of bfloat16.
    """
    from moe_finetune.checkpoint.loading import load_model
    from moe_finetune.models.fresh import fresh_config, fresh_model

    base, attention = base_folder(recipe), recipe.model.attn_implementation
    if recipe.model.init == "random":
        return fresh_model(fresh_config(base, recipe.model.config), recipe.seed, attention)
    dtype = recipe.model.dtype if recipe.lora is not None else "float32"
    return load_model(
        base,
        dtype=dtype,
        quantization=recipe.model.quantization,
        expert_ranks=expert_ranks(recipe),
        attn_implementation=attention,
    )


def expert_ranks(recipe: Recipe) -> int:
    """How many ranks together hold all experts of the recipe's model."""
    from moe_finetune.training import ranks

    asked = recipe.parallel.experts
    return ranks.world_size() if asked == "all" else asked


def second_model(recipe: Recipe) -> Any:
    """The teacher of a distillation, or the model that a preference is measured from."""
    from moe_finetune.checkpoint.loading import load_model

    if recipe.teacher is None:
        return start_model(recipe).requires_grad_(False)
    return load_model(recipe.teacher, dtype=recipe.model.dtype).requires_grad_(False)


@dataclass(frozen=True)
class Inputs:
    """What training starts from, read before anything is written; ``sources`` are measured.

    ``tokenizer`` is saved with what was trained; ``rendering`` is the trainer's, for turns that it
    renders itself, and ``date`` the day that its chat templates write, if they do.
    """

    tokenizer: Any
    rendering: Any
    date: str | None
    train: Any
    validation: Any
    sources: list[tuple[str, Any]]
    plan: Plan


@contextmanager
def tokenizer_faults(folder: str) -> Iterator[None]:
    """Report a fault inside the tokenizers library, which is no ``Exception``, as the tokenizer's.

    Raises:
        DataError: a pattern of ``tokenizer.json`` has no end on these texts, for example.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust; no module exports it
            raise
        raise DataError(
            f"{folder}: its tokenizer failed on the training data: {error}; repair the patterns in "
            "tokenizer.json, or name another model.tokenizer"
        ) from None


def check_inputs(recipe: Recipe, ignore_memory: bool = False, activations: bool = False) -> Inputs:
    """Find whatever is wrong with checkpoint, method, trainer, data or suite beforehand."""
    from moe_finetune.checkpoint.bias import bias_config
    from moe_finetune.checkpoint.gate import check_adapter
    from moe_finetune.checkpoint.opened import open_checkpoint
    from moe_finetune.checkpoint.untrained import stale_head
    from moe_finetune.data.stage_rows import load_for_stage
    from moe_finetune.evaluation.catalog import prepare
    from moe_finetune.evaluation.suites import load_suite, select
    from moe_finetune.lora.targets import adapts
    from moe_finetune.losses.objective import Objective
    from moe_finetune.models import family_of
    from moe_finetune.models.fresh import check_vocabulary, fresh_config
    from moe_finetune.models.loading import load_config, load_tokenizer
    from moe_finetune.moe.layers import config_facts
    from moe_finetune.moe.offload import check_offload
    from moe_finetune.training.packed import check_packing
    from moe_finetune.training.preconditions import (
        check_accelerator,
        check_launcher,
        check_parallel,
        check_quantization,
    )
    from moe_finetune.training.rehearsal import check_arguments, rehearse
    from moe_finetune.training.rollout import check_replay, check_rollouts
    from moe_finetune.training.teacher import check_teacher

    check_launcher()
    check_parallel(expert_ranks(recipe))
    if recipe.parallel.experts == "all" and expert_ranks(recipe) == 1:
        log.warning("parallel.experts: all, and one process was started: nothing is spread")
    check_quantization(recipe.model.quantization)
    if recipe.model.offload == "experts":
        check_offload()
    check_accelerator(recipe.trainer)
    check_arguments(recipe)
    base = base_folder(recipe)
    if recipe.model.init == "random":
        config = fresh_config(base, recipe.model.config)
        check_vocabulary(config, recipe.model.tokenizer or base)
    else:
        config = load_config(base)
        opened = open_checkpoint(base, values=True, stored=True)
        if opened.quantized is not None and expert_ranks(recipe) > 1:
            raise RecipeError(
                f"parallel.experts: {base} is stored as {opened.quantized.format}, and what is "
                "dequantised while it is loaded cannot be divided; name an unquantised checkpoint"
            )
        if opened.quantized is not None and recipe.export.merge and recipe.lora is not None:
            raise RecipeError(
                f"export.merge: {base} is stored as {opened.quantized.format}, and a run merges "
                "into an unquantized base; set export.merge: false, and merge the adapter with "
                "moe-finetune merge --format base (the same format), or --base and the "
                "unquantized checkpoint"
            )
        for line in stale_head(opened, adapts(recipe.lora, recipe.router.train)):
            log.warning("%s", line)
        if recipe.lora is not None and recipe.lora.start is not None:
            check_adapter(recipe.lora.start, opened)
    options = {name: term.model_dump() for name, term in recipe.method.terms.items()}
    Objective.from_options(options, config_facts(config))
    family = family_of(config)
    exported = recipe.export.merge or not adapts(recipe.lora, recipe.router.train)
    if recipe.method.bias_update is not None and recipe.method.export_bias == "write" and exported:
        try:
            bias_config(family, config.to_dict())
        except UnsupportedModelError as problem:
            raise RecipeError(
                f"method.bias_update: {problem}. In a recipe: set method.export_bias: drop, or "
                "export.merge: false with an adapter"
            ) from None
    if recipe.data.packing and recipe.data.packing_strategy != "wrapped":
        check_packing(config, family)
    check_rollouts(recipe, family)
    if recipe.router.train == "full" and adapts(recipe.lora, "full"):
        log.info(
            "router.train: full: vLLM serves this run's adapter only after a merge; to serve it "
            "unmerged over the base, set router.train to lora or frozen"
        )
    if recipe.router.replay:
        check_replay(family)
    if "teacher_routing" in recipe.method.terms:
        check_teacher(config, load_config(str(recipe.teacher)))
    if recipe.evaluation is not None:
        suite = load_suite(recipe.evaluation.suite)
        if recipe.evaluation.only is not None:
            suite = select(suite, recipe.evaluation.only)
        prepare(suite, recipe.evaluation.data_dir)
    tokenizer = load_tokenizer(recipe.model.tokenizer or base)
    with tokenizer_faults(recipe.model.tokenizer or str(base)):
        found = load_for_stage(recipe, tokenizer)
    examples = found.train, found.validation
    plan = rehearse(
        recipe, config, tokenizer, *examples, ignore_memory, activations, expert_ranks(recipe)
    )
    log.info("%s", plan.opening)
    for remark in plan.remarks:
        log.warning("%s", remark)
    rendering = tokenizer if found.tokenizer is None else found.tokenizer
    return Inputs(tokenizer, rendering, found.date, *examples, found.sources, plan)
