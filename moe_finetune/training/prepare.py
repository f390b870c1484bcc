"""Everything that is checked before a run begins: no weights are read, and no file is written.

In this order: launcher and versions, TRL's config, the checkpoint and what the method and the
adapter ask of it, the rows, memory, and the trainer itself, built on the meta device as in the run.
A library's error is reported with the recipe key that causes it.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_finetune.errors import (
    DataError,
    DependencyError,
    MoeFinetuneError,
    RecipeError,
    UnsupportedModelError,
)
from moe_finetune.io.terminal import terminal
from moe_finetune.models.structure import class_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks
from moe_finetune.training.fake_step import Device
from moe_finetune.training.memory import (
    GIB,
    machine_bytes,
    machine_room,
    plainly_fits,
    plan_recipe,
    stored_bytes,
)
from moe_finetune.training.plan import Plan
from moe_finetune.training.preconditions import check_whole_rows, launched_by
from moe_finetune.training.start import Start, expert_ranks, open_start

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from moe_finetune.io.run_folder import RunFolder

log = logging.getLogger(__name__)
ROWS = 8
"""Number of rows that the trainer on the meta device gets."""
Built = TypeVar("Built")


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

    def check_disk(self, run: RunFolder) -> None:
        """Refuse a run that does not fit on its disk; see :meth:`Plan.check_disk`."""
        base, merged = self.start.checkpoint, 0
        if self.start.recipe.export.merge and self.start.adapted and base is not None:
            merged = sum(info.size for info in base.tensors.values())
        self.plan.check_disk(run.adapter, merged)


def prepare(recipe: Recipe, ignore_memory: bool = False, activations: bool = False) -> Inputs:
    """Check ``recipe``, this machine, its checkpoint and its rows.

    Args:
        ignore_memory: allow a run that exceeds this machine's memory.
        activations: predict a step's memory even if it plainly fits, which takes a few seconds.

    Raises:
        MoeFinetuneError: the run cannot start; names the key and the remedy.
    """
    from moe_finetune.data.stage_rows import load_for_stage
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.training.reach import check_reach
    from moe_finetune.training.rewards import reward_functions
    from moe_finetune.training.trainer import training_arguments

    check_launch(recipe)
    check_machine(recipe)
    arguments = _with_culprit(recipe, lambda tried: training_arguments(tried, Path("checkpoints")))
    start = open_start(recipe)
    check_start(start)
    with tokenizer_faults(recipe.model.tokenizer or str(start.folder)):
        rows = load_for_stage(recipe, start.tokenizer)
    model = build_model(start)
    check_reach(model, Objective.from_options(recipe.method.options, model_facts(model)))
    plan = make_plan(start, model, arguments, rows.train, rows.validation, activations)
    if not ignore_memory:
        check_memory(plan)
    reward_functions(recipe.rewards, rows.train.column_names)
    # Trainers that hold a second model cannot be built without weights; several processes build
    # theirs together, with the launcher's plugins, once.
    if ranks.world_size() == 1 and STAGES[recipe.stage].form == "tokens":
        data = (start.tokenizer, rows.train, rows.validation)
        _with_culprit(recipe, lambda tried: build(tried, model, *data))
    for line in plan.opening():
        log.info("%s", line)
    for remark in plan.remarks():
        log.warning("%s", remark)
    rendering = start.tokenizer if rows.tokenizer is None else rows.tokenizer
    return Inputs(start, rendering, rows.train, rows.validation, rows.sources, plan)


# -- the recipe and this machine, before anything is opened --------------------------------------


def check_launch(recipe: Recipe) -> None:
    """Refuse a launcher that cannot start the run."""
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


def load_on_each_rank(setting: str, otherwise: str) -> None:
    """Prepare FSDP2 for ``setting``: each process reads its own weights; refuse other sharding.

    Accelerate's loading on rank 0 would broadcast float values, and rank 0's experts to all.

    Raises:
        RecipeError: FSDP1 or CPU offload is on.
    """
    if not launched_by("FSDP"):
        return
    problem = None
    if os.environ.get("FSDP_VERSION", "1") != "2":
        problem = "FSDP1, which flattens weights into one float tensor; set fsdp_version: 2"
    elif os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        problem = "fsdp_offload_params, which pins float shards; set it to false"
    if problem is not None:
        raise RecipeError(
            f"{setting} cannot be combined with {problem} in the accelerate "
            f"config (recipes/hardware/fsdp2_8gpu.yaml is one), or {otherwise}"
        )
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def check_machine(recipe: Recipe) -> None:
    """Refuse settings that need a missing device or package."""
    import torch

    from moe_finetune.moe.offload import check_offload
    from moe_finetune.quantization.codec import check_format

    kind, trainer = recipe.model.quantization, recipe.trainer
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


# -- the opened checkpoint ------------------------------------------------------------------------


def check_start(start: Start) -> None:
    """Refuse what the checkpoint's architecture or its files rule out; warn of surprises."""
    from moe_finetune.checkpoint.open import stale_head
    from moe_finetune.checkpoint.updates import check_adapter
    from moe_finetune.evaluation.catalog import prepare as prepare_suite
    from moe_finetune.evaluation.suites import load_suite, select
    from moe_finetune.losses.objective import Objective
    from moe_finetune.moe.layers import config_facts
    from moe_finetune.training.grpo import check_replay, check_rollouts
    from moe_finetune.training.packed import check_packing

    recipe, checkpoint, config, family = start.recipe, start.checkpoint, start.config, start.family
    stored = None if checkpoint is None else checkpoint.quantized
    if stored is not None and recipe.export.merge and recipe.lora is not None:
        raise RecipeError(
            f"export.merge: {start.folder} is stored as {stored.format}, but a run merges into an "
            "unquantized base; set export.merge: false, then merge the adapter with moe-finetune "
            "merge --format base (the same format), or --base and the unquantized checkpoint"
        )
    for line in () if checkpoint is None else stale_head(checkpoint, start.adapted):
        log.warning("%s", line)
    if recipe.lora is not None and recipe.lora.start is not None:
        if checkpoint is None:
            raise RecipeError(
                "lora.start: an adapter needs the base that it was trained on, but model.init is "
                "random; leave one of them out"
            )
        check_adapter(recipe.lora.start, checkpoint)
    Objective.from_options(recipe.method.options, config_facts(config, family))
    check_bias_export(start)
    if recipe.data.packing and recipe.data.packing_strategy != "wrapped":
        check_packing(config, family)
    check_rollouts(recipe, family)
    if recipe.router.replay:
        check_replay(family)
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


# -- the run on the meta device -------------------------------------------------------------------


def build_model(start: Start) -> nn.Module:
    """The run's model with its adapter on the meta device.

    Raises:
        RecipeError: this machine or the model rejects a setting; names its key.
    """
    import torch

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models import opened_as
    from moe_finetune.moe.layers import model_facts
    from moe_finetune.moe.spread import check_spread

    attention = start.recipe.model.attn_implementation
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
    if start.expert_ranks > 1:
        experts = model_facts(model).num_experts
        check_spread(model, experts, start.expert_ranks, ranks.world_size())
    with torch.device("meta"):
        return add_lora(model, start.recipe.lora, start.recipe.router.train)


def make_plan(
    start: Start,
    model: nn.Module,
    arguments: Any,
    train: Dataset,
    validation: Dataset | None,
    activations: bool,
) -> Plan:
    """Count what the run needs; a step is planned only if asked for, or if it may not fit."""
    import torch

    from moe_finetune.lora.coverage import lora_coverage

    as_long = as_long_as(start.recipe, train)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    fixed, room = stored_bytes(model, start.recipe).fixed, machine_room()
    memory, unknown = None, None
    plain = ranks.world_size() > 1 or plainly_fits(start.config, as_long, fixed, room)
    if activations or not (plain or fixed > room):
        try:
            with nullcontext() if activations else terminal().phase("plan"):
                memory = plan_recipe(start.config, as_long, device)
        except UnsupportedModelError as error:  # the run needs no plan
            unknown = str(error) if activations else None
    coverage = lora_coverage(model)
    return Plan(
        start.recipe,
        arguments,
        coverage,
        fixed,
        memory,
        unknown,
        train,
        validation,
        machine_bytes(),
    )


def as_long_as(recipe: Recipe, train: Dataset) -> Recipe:
    """``recipe`` with ``data.max_length`` lowered to its longest row, unless rows are packed."""
    if recipe.data.packing or "input_ids" not in train.column_names or not len(train):
        return recipe
    import pyarrow.compute as pc

    longest = pc.max(pc.list_value_length(train.data.column("input_ids"))).as_py()
    data = recipe.data.model_copy(update={"max_length": min(longest, recipe.data.max_length)})
    return recipe.model_copy(update={"data": data})


def check_memory(plan: Plan) -> None:
    """Refuse a run that does not fit into this machine's memory."""
    if plan.fixed > plan.machine:
        raise RecipeError(
            f"the run needs {plan.fixed / GIB:.1f} GiB for weights, adapter and optimizer, but "
            f"this machine has {plan.machine / GIB:.1f} GiB;\nlower lora.rank, choose fewer "
            "lora.targets, or take more devices; where weights are offloaded, --ignore-memory "
            "starts it anyway"
        )
    if plan.memory is not None and ranks.world_size() == 1 and plan.memory.total > machine_room():
        lines = [*plan.memory.lines(), plan.memory.verdict(plan.machine / GIB)]
        raise RecipeError("\n".join([*lines, "--ignore-memory starts the run anyway"]))


def build(
    recipe: Recipe, model: nn.Module, tokenizer: Any, train: Dataset, validation: Dataset | None
) -> None:
    """Build the trainer with optimizer, schedule and first data loader, on a few rows."""
    from moe_finetune.training.trainer import build_trainer

    few = [None if rows is None else rows.select(range(min(ROWS, len(rows))))
           for rows in (train, validation)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, _quiet():
        trainer, _ = build_trainer(recipe, Path(folder), model, tokenizer, few[0], few[1])
        trainer.get_train_dataloader()
        trainer.create_optimizer_and_scheduler(num_training_steps=2)


def _with_culprit(recipe: Recipe, build: Callable[[Recipe], Built]) -> Built:
    """Return ``build(recipe)``; name the trainer's key without which a library's error is gone."""
    try:
        return build(recipe)
    except MoeFinetuneError:
        raise
    except Exception as error:
        culprit = "trainer:"
        for name, value in recipe.trainer.items():
            others = {key: other for key, other in recipe.trainer.items() if key != name}
            try:
                build(recipe.model_copy(update={"trainer": others}))
            except Exception:  # still refused: another key is to blame
                continue
            culprit = f"trainer.{name}: {value!r}"
            break
        remedy = "" if culprit == "trainer:" else "; change it or leave it out"
        raise RecipeError(f"{culprit} cannot be used here: {_short(error)}{remedy}") from error


def _short(error: Exception) -> str:
    """An error's message in one line, or the name of its type."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and warnings that the run will show again."""
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    hidden, level = are_progress_bars_disabled(), logging.root.manager.disable
    disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        if not hidden:
            enable_progress_bars()
