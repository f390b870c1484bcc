"""Everything that is checked before a run begins: no weights are read, and no file is written.

In this order: launcher and machine, TRL's config, the checkpoint and what the method and the
adapter ask of it, the rows, memory, and the trainer itself, built on the meta device as in the run.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_finetune.errors import (
    DataError,
    DependencyError,
    MoeFinetuneError,
    RecipeError,
    UnsupportedModelError,
)
from moe_finetune.models.structure import class_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks
from moe_finetune.training.memory import (
    GIB,
    MemoryPlan,
    machine_bytes,
    plan_model,
    quiet,
    stored_bytes,
)
from moe_finetune.training.preconditions import check_launch, expert_ranks, load_on_each_rank
from moe_finetune.training.rehearsal import rehearsing
from moe_finetune.training.start import Inputs, Start, announce, open_start

if TYPE_CHECKING:
    from torch import nn


log = logging.getLogger(__name__)
ROWS = 8
"""Number of rows that the trainer on the meta device gets."""
Built = TypeVar("Built")


def prepare(recipe: Recipe, ignore_memory: bool = False) -> Inputs:
    """Check ``recipe``, this machine, its checkpoint and its rows.

    Args:
        ignore_memory: allow a run that exceeds this machine's memory.
    """
    from moe_finetune.data.stages import load_for_stage
    from moe_finetune.lora.coverage import lora_coverage
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.training.grpo import check_engine
    from moe_finetune.training.reach import check_reach
    from moe_finetune.training.rewards import reward_functions
    from moe_finetune.training.save import training_tokenizer
    from moe_finetune.training.trainer import training_arguments

    check_launch(recipe)
    check_machine(recipe)
    arguments = blamed(recipe, lambda tried: training_arguments(tried, Path("checkpoints")))
    check_optimizer(recipe, arguments)
    check_engine(recipe, arguments)
    start = open_start(recipe)
    check_start(start)
    with rehearsing(start) as rehearsal:
        try:
            rows = load_for_stage(recipe, start.tokenizer)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a Rust panic; no module exports its type
                raise
            raise DataError(
                f"{recipe.model.tokenizer or start.folder}: its tokenizer failed on the training "
                f"data: {error}; repair the patterns in tokenizer.json, or choose another "
                "model.tokenizer"
            ) from None
        training_tokenizer(start.tokenizer, recipe)  # the small files of a save
        model = build_model(start)
        if start.checkpoint is not None and recipe.lora is not None and recipe.lora.start:
            from moe_finetune.training.train import continue_adapter

            continue_adapter(model, Path(recipe.lora.start), start.checkpoint)  # ranks and parts
        check_ids(start, model, rows.largest_id, arguments)
        check_reach(model, Objective(recipe.method.terms, model_facts(model)))
        inputs = Inputs(
            start,
            rows.train,
            rows.validation,
            rows.sources,
            arguments,
            lora_coverage(model),
            stored_bytes(model, recipe).fixed,
        )
        inputs = replace(inputs, memory=plan_step(inputs, model))
        if not ignore_memory:
            check_memory(inputs)
        reward_functions(recipe.rewards, rows.train.column_names)
        # Other stages' trainers cannot be built without weights; several processes build
        # theirs together, with the launcher's plugins, once.
        if ranks.world_size() == 1 and STAGES[recipe.stage].form == "tokens":
            blamed(recipe, lambda tried: build_on_meta(tried, model, inputs))
        rehearsal.check()
    announce(inputs)
    return inputs


# -- the recipe and this machine, before anything is opened --------------------------------------


def check_machine(recipe: Recipe) -> None:
    """Refuse settings that need a missing device or package."""
    import torch

    from moe_finetune.moe.offload import check_offload
    from moe_finetune.quantization.codec import check_format
    from moe_finetune.vllm.install import require_vllm

    kind, trainer = recipe.model.quantization, recipe.trainer
    if recipe.evaluation is not None and recipe.evaluation.backend == "vllm":
        require_vllm(try_import=False, instead="set evaluation.backend: hf")
    if trainer.get("use_vllm"):
        require_vllm(try_import=False, instead="set trainer.use_vllm: false")
    if check_format(kind, "model.quantization"):
        load_on_each_rank(f"model.quantization: '{kind}'", "set model.quantization: none")
    if recipe.model.offload == "experts":
        check_offload()
    if trainer.get("activation_offloading") and not torch.accelerator.is_available():
        raise RecipeError(
            "trainer.activation_offloading: moves activations from GPU to CPU memory, but there "
            "is no GPU; leave it out"
        )
    if trainer.get("use_liger_kernel") and importlib.util.find_spec("liger_kernel") is None:
        raise DependencyError(
            "trainer.use_liger_kernel: Liger is not installed; pip install liger-kernel, or leave "
            "the key out"
        )


def check_optimizer(recipe: Recipe, arguments: Any) -> None:
    """Refuse options that the optimizer does not read, or cannot."""
    from transformers import Trainer

    given = recipe.trainer.get("optim_args")

    def options(optim_args: Any) -> Any:
        changed = copy.copy(arguments)
        changed.optim_args = optim_args
        return Trainer.get_optimizer_cls_and_kwargs(changed)[1]

    try:
        without = options(None)
    except (ValueError, ImportError):  # made for the model's layers, or not installed: built later
        return
    key = f"trainer.optim_args: {given!r}"
    try:
        unread = given is not None and options(given) == without
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{key} cannot be used here: {_short(error)}; leave it out") from error
    if unread:
        raise RecipeError(f"{key} has no effect with optim {arguments.optim.value}; leave it out")
    if recipe.trainer.get("optim_target_modules") is not None:
        raise RecipeError(
            f"trainer.optim_target_modules: has no effect with optim {arguments.optim.value}; "
            "leave it out"
        )


# -- the opened checkpoint and its rows -----------------------------------------------------------


def check_start(start: Start) -> None:
    """Refuse what the checkpoint's architecture or its files rule out; warn of surprises."""
    from moe_finetune.checkpoint.bias import bias_config
    from moe_finetune.checkpoint.export import carried_files
    from moe_finetune.checkpoint.open import stale_head
    from moe_finetune.checkpoint.updates import check_adapter
    from moe_finetune.evaluation.catalog import prepare as prepare_suite
    from moe_finetune.evaluation.suites import load_suite, select
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.layers import config_facts
    from moe_finetune.training.grpo import check_replay, check_rollouts
    from moe_finetune.training.packed import check_packing

    recipe, checkpoint, config, family = start.recipe, start.checkpoint, start.config, start.family
    method, lora = recipe.method, recipe.lora
    for line in () if checkpoint is None else stale_head(checkpoint, start.adapted):
        log.warning("%s", line)
    if recipe.export.merge or not start.adapted:
        carried_files(start.folder)  # what cannot be copied at the end is refused now
    if lora is not None and lora.start is not None:
        if checkpoint is None:
            raise RecipeError(
                "lora.start: an adapter needs the base that it was trained on, but model.init is "
                "random; leave one of them out"
            )
        check_adapter(lora.start, checkpoint)
    facts = config_facts(config, family)
    if facts.num_experts < 2:
        raise UnsupportedModelError(
            f"{start.folder}: its MoE layers have one expert, so there is no routing to train or "
            "measure; train it as a dense model, with TRL"
        )
    Objective(method.terms, facts)
    exported = method.export_bias == "write" and (recipe.export.merge or not start.adapted)
    if method.bias_update is not None and exported:
        try:
            bias_config(family, config.to_dict())
        except UnsupportedModelError as problem:
            raise RecipeError(
                f"method.bias_update: {problem}. In a recipe, set method.export_bias: drop, or "
                "export.merge: false with an adapter"
            ) from None
    if recipe.data.packing and recipe.data.packing_strategy != "wrapped":
        check_packing(config, family)
    check_rollouts(recipe, family)
    check_replay(recipe, family)
    if recipe.router.train == "full" and start.adapted:
        log.info(
            "router.train: full: vLLM serves this run's adapter only after a merge; to serve it "
            "unmerged over the base, set router.train to lora or frozen"
        )
    if recipe.router.train == "frozen" and not recipe.method.trains_routers:
        log.info("router.train: frozen: no loss of the method trains routers")
    if (section := recipe.evaluation) is not None:
        suite = load_suite(section.suite)
        suite = suite if section.only is None else select(suite, section.only)
        prepare_suite(suite, section.data_dir)


def check_ids(start: Start, model: Any, largest_id: int, arguments: Any) -> None:
    """Refuse a token without a row in the embedding: the batch that has it would end the run.

    Args:
        largest_id: of all rows; ids that no row uses are fine.
    """
    embedding, tokenizer = model.get_input_embeddings(), start.tokenizer
    rows, source = embedding.num_embeddings, start.recipe.model.tokenizer or start.folder
    named = getattr(arguments, "pad_token", None)
    pad = tokenizer.pad_token_id if named is None else tokenizer.convert_tokens_to_ids(named)
    batches = [arguments.per_device_train_batch_size]
    if start.recipe.data.validation is not None:
        batches.append(arguments.per_device_eval_batch_size)
    padded = max(batches) > 1 and not start.recipe.data.packing
    padded |= bool(getattr(arguments, "pad_to_multiple_of", None))
    padded |= STAGES[start.recipe.stage].form != "tokens"  # both answers of a preference
    for what, token in (("the data have", largest_id), ("batches are padded with", pad)):
        if token is None or token < rows or (token == pad != largest_id and not padded):
            continue
        raise DataError(
            f"{source}: {what} token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), but the "
            f"checkpoint's embedding has {rows} rows; use the tokenizer of the checkpoint, or "
            + ("set trainer.pad_token" if token == pad else "remove the token from the rows")
        )


# -- the run on the meta device -------------------------------------------------------------------


def build_model(start: Start) -> nn.Module:
    """The run's model with its adapter on the meta device."""
    import torch

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models import opened_as
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.moe.spread import check_spread

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
            f"model.attn_implementation: '{attention}' cannot be used here: {_short(error)}; "
            "leave it out"
        ) from error
    except (RuntimeError, TypeError, KeyError) as error:
        raise RecipeError(f"model.config: {config.model_type} cannot be built: {error}") from error
    opened_as(start.family, model)
    if (spread := expert_ranks(recipe)) > 1:
        check_spread(model, model_facts(model).num_experts, spread, ranks.world_size())
    with torch.device("meta"):
        return add_lora(model, recipe.lora, recipe.router.train)


def plan_step(inputs: Inputs, model: nn.Module) -> MemoryPlan | None:
    """The memory of a step on the longest row; None if several GPUs share the model."""
    import pyarrow.compute as pc
    import torch

    recipe, train = inputs.start.recipe, inputs.train
    if ranks.world_size() > 1:
        return None
    if not recipe.data.packing and "input_ids" in train.column_names and len(train):
        longest = pc.max(pc.list_value_length(train.data.column("input_ids"))).as_py()
        data = recipe.data.model_copy(update={"max_length": min(longest, recipe.data.max_length)})
        recipe = recipe.model_copy(update={"data": data})
    return plan_model(model, recipe, "cuda" if torch.cuda.is_available() else "cpu")


def check_memory(inputs: Inputs) -> None:
    """Refuse a run that does not fit into this machine's memory."""
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


def build_on_meta(recipe: Recipe, model: nn.Module, inputs: Inputs) -> None:
    """Build the trainer with optimizer, schedule and first data loader, on a few rows."""
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    from moe_finetune.training.trainer import build_trainer

    few = [None if rows is None else rows.select(range(min(ROWS, len(rows))))
           for rows in (inputs.train, inputs.validation)]  # fmt: skip
    visible = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            trainer, _ = build_trainer(recipe, Path(folder), model, inputs.start.tokenizer, *few)
            trainer.get_train_dataloader()
            trainer.create_optimizer_and_scheduler(num_training_steps=2)
    finally:
        if visible:
            enable_progress_bars()


def blamed(recipe: Recipe, build: Callable[[Recipe], Built]) -> Built:
    """Return ``build(recipe)``; name the trainer's key that a library's error is about.

    It is the key that the error's words are most like, if the error is gone without it.
    """
    try:
        return build(recipe)
    except MoeFinetuneError:
        raise
    except Exception as error:
        words, culprit, remedy = _short(error), "trainer:", ""
        if recipe.trainer:
            name = max(recipe.trainer, key=lambda name: _likeness(words, name, recipe.trainer))
            others = {key: value for key, value in recipe.trainer.items() if key != name}
            with suppress(Exception):  # still refused: another key is to blame
                build(recipe.model_copy(update={"trainer": others}))
                culprit = f"trainer.{name}: {recipe.trainer[name]!r}"
                remedy = "; change it or leave it out"
        raise RecipeError(f"{culprit} cannot be used here: {words}{remedy}") from error


def _likeness(words: str, name: str, trainer: dict[str, Any]) -> tuple[bool, bool, int]:
    """Whether ``words`` have a key's name or its value, and how many parts of the name."""
    value = trainer[name]
    texts = map(str, value if isinstance(value, list | dict) else [value])
    parts = sum(len(part) > 3 and part in words for part in name.split("_"))
    return name in words, any(len(text) > 2 and text in words for text in texts), parts


def _short(error: Exception) -> str:
    """An error's message in one line, or the name of its type."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
