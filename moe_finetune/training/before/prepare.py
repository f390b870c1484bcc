"""Everything that is checked before a run begins: no weights are read, and no file is written."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Trainer

from moe_finetune.data.load_rows import Examples, load_for_stage
from moe_finetune.errors import DataError, MoeFinetuneError, RecipeError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.objective import Objective
from moe_finetune.models import opened_as
from moe_finetune.models.class_structure import class_of
from moe_finetune.moe.large.spread_experts import check_spread
from moe_finetune.moe.layers import backbone_of, model_facts
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks
from moe_finetune.training.before import refuse_recipe
from moe_finetune.training.before.refuse_recipe import in_one_line
from moe_finetune.training.before.toy_step import likeness, rehearsing
from moe_finetune.training.memory.plan import (
    GIB,
    machine_bytes,
    plan_model,
    quiet,
    stored_bytes,
)
from moe_finetune.training.memory.step_bytes import Device
from moe_finetune.training.reached_weights import check_reach
from moe_finetune.training.refuse_launch import check_arguments, check_launch, expert_ranks
from moe_finetune.training.run.checkpoint_and_rows import Inputs, Start, announce, open_start
from moe_finetune.training.run.train import continued
from moe_finetune.training.run.trainer import training_arguments
from moe_finetune.training.save_and_resume.save_trained import training_tokenizer
from moe_finetune.training.stages.grpo_trainer import check_engine
from moe_finetune.training.stages.rewards import reward_functions

log = logging.getLogger(__name__)
CHECKPOINTS = Path("checkpoints")
"""Stands for the run's folder, of which the checks write nothing."""
Built = TypeVar("Built")


def prepare(recipe: Recipe, ignore_memory: bool = False) -> Inputs:
    """Check ``recipe``, this machine, its checkpoint and its rows, what is quickest first.

    Args:
        ignore_memory: allow a run that exceeds this machine's memory.
    """
    check_launch(recipe)
    refuse_recipe.check_trainer_keys(recipe)
    refuse_recipe.check_machine(recipe)
    arguments = blamed(recipe, lambda tried: training_arguments(tried, CHECKPOINTS))
    refuse_recipe.check_reporters(arguments)
    refuse_recipe.check_optimizer(recipe, arguments)
    check_engine(recipe, arguments)
    start = open_start(recipe)
    refuse_recipe.check_start(start)
    with rehearsing(start) as rehearsal:  # in a child, while rows are read
        rows = read_rows(start)
        training_tokenizer(start.tokenizer, recipe)
        model = build_model(start)
        check_built_optimizer(recipe, model)
        check_arguments(arguments, recipe.method, backbone_of(model).config)
        continued(start, model)
        check_ids(start, model, rows, arguments)
        check_reach(model, Objective(recipe.method.terms, model_facts(model)))
        inputs = plan_inputs(start, rows, arguments, model)
        check_memory(inputs, ignore_memory)
        reward_functions(recipe.rewards, rows.train.column_names)
        rehearsal.check()
    announce(inputs)
    return inputs


def read_rows(start: Start) -> Examples:
    """The rows of the recipe, in the form of its stage."""
    recipe = start.recipe
    try:
        return load_for_stage(recipe, start.tokenizer)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic; no module exports its type
            raise
        raise DataError(
            f"{recipe.model.tokenizer or start.folder}: its tokenizer failed on the training data: "
            f"{error}; repair the patterns in tokenizer.json, or choose another model.tokenizer"
        ) from None


def plan_inputs(start: Start, rows: Examples, arguments: Any, model: nn.Module) -> Inputs:
    """The inputs of training, with what a step on ``rows`` needs."""
    fixed, memory = stored_bytes(model, start.recipe).fixed, None
    if ranks.world_size() == 1:
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        memory = plan_model(model, start.recipe, device, lengths=rows.lengths)
    return Inputs(start, rows, arguments, lora_coverage(model), fixed, memory)


def check_ids(start: Start, model: Any, rows: Examples, arguments: Any) -> None:
    """Refuse a token without a row in the embedding: the batch that has it would end the run.

    Ids that no row of the data uses are fine.
    """
    size, tokenizer = model.get_input_embeddings().num_embeddings, start.tokenizer
    source, largest_id = start.recipe.model.tokenizer or start.folder, rows.largest_id
    named = getattr(arguments, "pad_token", None)
    pad = tokenizer.pad_token_id if named is None else tokenizer.convert_tokens_to_ids(named)
    batches = [arguments.per_device_train_batch_size]
    if start.recipe.data.validation is not None:
        batches.append(arguments.per_device_eval_batch_size)
    padded = max(batches) > 1 and not start.recipe.data.packing
    padded |= bool(getattr(arguments, "pad_to_multiple_of", None))
    padded |= STAGES[start.recipe.stage].form != "tokens"  # both answers of a preference
    for what, token in (("the data have", largest_id), ("batches are padded with", pad)):
        if token is None or token < size or (token == pad != largest_id and not padded):
            continue
        remedy = "use the tokenizer of the checkpoint"
        if token != pad:
            remedy += ", or remove the token from the rows"
        elif hasattr(arguments, "pad_token"):  # GRPO's has none
            remedy += ", or set trainer.pad_token"
        raise DataError(
            f"{source}: {what} token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), but the "
            f"checkpoint's embedding has {size} rows; {remedy}"
        )


def build_model(start: Start) -> nn.Module:
    """The run's model with its adapter on the meta device."""
    recipe, attention = start.recipe, start.recipe.model.attn_implementation
    # A model notes kernels and dtype in its config, and the run's is the merge's and verify's too.
    config = copy.deepcopy(start.config)
    try:
        with torch.device("meta"):
            model: nn.Module = class_of(config).from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
    except (ImportError, ValueError) as error:
        raise RecipeError(
            f"model.attn_implementation: '{attention}' cannot be used here: {in_one_line(error)}; "
            "leave it out"
        ) from error
    except (RuntimeError, TypeError, KeyError) as error:
        raise RecipeError(f"model.config: {config.model_type} cannot be built: {error}") from error
    opened_as(start.family, model)
    if (spread := expert_ranks(recipe)) > 1:
        check_spread(model, model_facts(model).num_experts, spread, ranks.world_size())
    with torch.device("meta"):
        return add_lora(model, recipe.lora, recipe.router.train, recipe.router.layers)


def check_memory(inputs: Inputs, ignore_memory: bool) -> None:
    """Refuse a run that does not fit into this machine's memory."""
    if ignore_memory:
        return
    machine, memory = machine_bytes(), inputs.memory
    if inputs.fixed > machine:
        raise RecipeError(
            f"the run needs {inputs.fixed / GIB:.1f} GiB for weights, adapter and optimizer, but "
            f"this machine has {machine / GIB:.1f} GiB;\nlower lora.rank, choose fewer "
            "lora.targets, or take more devices; where weights are offloaded, --ignore-memory "
            "starts it anyway"
        )
    if memory is not None and not memory.fits(machine / GIB):
        lines = "\n".join([*memory.lines(), memory.verdict(machine / GIB)])
        if memory.exceeds(machine / GIB):
            raise RecipeError(f"{lines}\n--ignore-memory starts the run anyway")
        log.warning("%s", lines)


def check_built_optimizer(recipe: Recipe, model: Any) -> None:
    """Refuse what the optimizer refuses when it is made for ``model``: a package, a layer, a value.

    Some are made for the model's layers; parameters on the meta device do for all.
    """

    def build(tried: Recipe) -> None:
        arguments = training_arguments(tried, CHECKPOINTS)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        if not {"params", "model", "optimizer_dict"} & options.keys():
            kind([p for p in model.parameters() if p.requires_grad], **options)

    with quiet():
        blamed(recipe, build)


def blamed(recipe: Recipe, build: Callable[[Recipe], Built]) -> Built:
    """Return ``build(recipe)``; name the trainer's key that a library's error is about.

    It is the key that the error's words are most like, if the error is gone without it.
    """
    try:
        return build(recipe)
    except MoeFinetuneError:
        raise
    except Exception as error:
        words = in_one_line(error)
        culprit = "trainer:"
        remedy = ""
        if recipe.trainer:
            name = max(recipe.trainer, key=lambda name: likeness(words, name, recipe.trainer[name]))
            others = {key: value for key, value in recipe.trainer.items() if key != name}
            with suppress(Exception):  # still refused: another key is to blame
                build(recipe.model_copy(update={"trainer": others}))
                culprit = f"trainer.{name}: {recipe.trainer[name]!r}"
                remedy = "; change it or leave it out"
        raise RecipeError(f"{culprit} cannot be used here: {words}{remedy}") from error
