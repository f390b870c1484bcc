"""Checks of a recipe before its run begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import DataError, RecipeError, UnsupportedModelError
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.start import Start, expert_ranks, open_start

if TYPE_CHECKING:
    from moe_finetune.training.run_plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The inputs of training, read before anything is written.

    Attributes:
        rendering: the trainer's tokenizer, for stages whose trainer renders the turns.
        sources: rows by source, for measuring routing.
    """

    start: Start
    rendering: Any
    train: Any
    validation: Any
    sources: list[tuple[str, Any]]
    plan: Plan


@contextmanager
def tokenizer_faults(folder: str) -> Iterator[None]:
    """Report a panic inside the tokenizers library, which is no ``Exception``, as a DataError.

    Raises:
        DataError: the library failed; for example, a pattern in ``tokenizer.json`` never ends on
            these texts.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic; no module exports its type
            raise
        raise DataError(
            f"{folder}: its tokenizer failed on the training data: {error}; repair the patterns "
            "in tokenizer.json, or choose another model.tokenizer"
        ) from None


def check_inputs(recipe: Recipe, ignore_memory: bool = False, activations: bool = False) -> Inputs:
    """Check checkpoint, method, trainer, data and suite before the run begins."""
    from moe_finetune.data.stage_rows import load_for_stage
    from moe_finetune.training.rehearsal import rehearse

    for check in MACHINE_CHECKS:
        check(recipe)
    start = open_start(recipe)
    for check_start in START_CHECKS:
        check_start(start)
    with tokenizer_faults(recipe.model.tokenizer or str(start.folder)):
        rows = load_for_stage(recipe, start.tokenizer)
    plan = rehearse(start, rows.train, rows.validation, ignore_memory, activations)
    log.info("%s", plan.opening)
    log.info("%s", plan.memory_line)
    for remark in plan.remarks:
        log.warning("%s", remark)
    rendering = start.tokenizer if rows.tokenizer is None else rows.tokenizer
    return Inputs(start, rendering, rows.train, rows.validation, rows.sources, plan)


# -- checks of the recipe and this machine, before anything is opened ----------------------------


def check_launch(recipe: Recipe) -> None:
    """Refuse a launcher that cannot start the run."""
    from moe_finetune.training.preconditions import (
        check_whole_rows,
        launched_by,
        load_on_each_rank,
    )

    spread = expert_ranks(recipe)
    if launched_by("DEEPSPEED"):  # whose engine keeps gradients and optimizer to itself
        raise RecipeError(
            "the launcher's config has distributed_type: DEEPSPEED, which cannot resume (it "
            "stores the optimizer in pickle files, which are never loaded); use FSDP2: "
            "accelerate launch --config_file recipes/hardware/fsdp2_8gpu.yaml"
        )
    check_whole_rows()
    if spread > 1:
        load_on_each_rank(f"parallel.experts: {spread}", "leave the key out")
    if recipe.parallel.experts == "all" and spread == 1:
        log.warning(
            "parallel.experts: all, but only one process was started, so experts are not spread"
        )


def check_machine(recipe: Recipe) -> None:
    """Refuse settings that need a missing device or package."""
    from moe_finetune.moe.offload import check_offload
    from moe_finetune.training.preconditions import check_accelerator, check_quantization

    check_quantization(recipe.model.quantization)
    if recipe.model.offload == "experts":
        check_offload()
    check_accelerator(recipe.trainer)


def check_trainer(recipe: Recipe) -> None:
    """Refuse keys under ``trainer:`` that transformers or TRL rejects."""
    from moe_finetune.training.rehearsal import check_arguments

    check_arguments(recipe)


# -- checks of the opened checkpoint -------------------------------------------------------------


def check_stored_quantized(start: Start) -> None:
    """Refuse settings that a base checkpoint stored quantized rules out."""
    recipe, checkpoint = start.recipe, start.checkpoint
    if checkpoint is None or checkpoint.quantized is None:
        return
    stored = f"{start.folder} is stored as {checkpoint.quantized.format}"
    if recipe.export.merge and recipe.lora is not None:
        raise RecipeError(
            f"export.merge: {stored}, but a run merges into an unquantized base; set "
            "export.merge: false, then merge the adapter with moe-finetune merge --format base "
            "(the same format), or --base and the unquantized checkpoint"
        )


def check_head(start: Start) -> None:
    """Warn about an MTP head whose input layers training changes."""
    from moe_finetune.checkpoint.untrained import stale_head

    if start.checkpoint is not None:
        for line in stale_head(start.checkpoint, start.adapted):
            log.warning("%s", line)


def check_first_adapter(start: Start) -> None:
    """Refuse an adapter to continue from that does not fit the base."""
    from moe_finetune.checkpoint.gate import check_adapter

    lora = start.recipe.lora
    if lora is None or lora.start is None:
        return
    if start.checkpoint is None:
        raise RecipeError(
            "lora.start: an adapter needs the base that it was trained on, but model.init is "
            "random; leave one of them out"
        )
    check_adapter(lora.start, start.checkpoint)


def check_method(start: Start) -> None:
    """Refuse losses that this architecture cannot compute."""
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.layers import config_facts

    options = {name: term.model_dump() for name, term in start.recipe.method.terms.items()}
    Objective.from_options(options, config_facts(start.config, start.family))


def check_bias_export(start: Start) -> None:
    """Refuse a loss-free bias that the family's checkpoints have no tensor for."""
    from moe_finetune.checkpoint.bias import bias_config

    method = start.recipe.method
    exported = start.recipe.export.merge or not start.adapted
    if method.bias_update is None or method.export_bias != "write" or not exported:
        return
    try:
        bias_config(start.family, start.config.to_dict())
    except UnsupportedModelError as problem:
        raise RecipeError(
            f"method.bias_update: {problem}. In a recipe, set method.export_bias: drop, or "
            "export.merge: false with an adapter"
        ) from None


def check_rows(start: Start) -> None:
    """Refuse packing and rollouts that this architecture computes wrongly."""
    from moe_finetune.training.packed import check_packing
    from moe_finetune.training.rollout import check_replay, check_rollouts

    recipe = start.recipe
    if recipe.data.packing and recipe.data.packing_strategy != "wrapped":
        check_packing(start.config, start.family)
    check_rollouts(recipe, start.family)
    if recipe.router.replay:
        check_replay(start.family)


def check_router(start: Start) -> None:
    """Log that an adapter with whole routers can be served only after a merge."""
    if start.recipe.router.train == "full" and start.adapted:
        log.info(
            "router.train: full: vLLM serves this run's adapter only after a merge; to serve it "
            "unmerged over the base, set router.train to lora or frozen"
        )


def check_suite(start: Start) -> None:
    """Refuse an evaluation whose tasks or data are missing."""
    from moe_finetune.evaluation.catalog import prepare
    from moe_finetune.evaluation.suites import load_suite, select

    section = start.recipe.evaluation
    if section is not None:
        suite = load_suite(section.suite)
        if section.only is not None:
            suite = select(suite, section.only)
        prepare(suite, section.data_dir)


MACHINE_CHECKS: tuple[Callable[[Recipe], None], ...] = (check_launch, check_machine, check_trainer)
START_CHECKS: tuple[Callable[[Start], None], ...] = (
    check_stored_quantized,
    check_head,
    check_first_adapter,
    check_method,
    check_bias_export,
    check_rows,
    check_router,
    check_suite,
)
