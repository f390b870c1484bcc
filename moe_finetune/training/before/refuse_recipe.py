"""What the recipe, this machine and the opened checkpoint rule out, one function a matter."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import Any

import torch
from transformers import Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.exported_bias import bias_config
from moe_finetune.checkpoint.open import stale_head
from moe_finetune.checkpoint.small_files import carried_files
from moe_finetune.errors import DependencyError, RecipeError, UnsupportedModelError, did_you_mean
from moe_finetune.evaluation.suite_lines import ready_lines
from moe_finetune.evaluation.suites import load_suite, select
from moe_finetune.io.checkpoint_files import PRUNED
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.experts.dense_router import check_dense
from moe_finetune.moe.large.offload import check_offload
from moe_finetune.moe.layers import config_facts
from moe_finetune.quantization.codec import check_format
from moe_finetune.recipe.explain_errors import check_trainer
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.refuse_launch import load_on_each_rank
from moe_finetune.training.refuse_packing import check_packing
from moe_finetune.training.run.checkpoint_and_rows import Start
from moe_finetune.training.stages.grpo_trainer import check_replay, check_rollouts
from moe_finetune.vllm.install import require_vllm

log = logging.getLogger(__name__)
REPORTERS = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
}
"""Packages of loggers that are not named as they are: one of them has to be installed."""


def check_trainer_keys(recipe: Recipe) -> None:
    """Refuse values that TRL's class does not take; without TRL, only its source was read."""
    if problems := list(check_trainer(recipe.trainer, STAGES[recipe.stage])):
        raise RecipeError("\n".join(problems))


def check_machine(recipe: Recipe) -> None:
    """Refuse settings that need a missing device or package."""
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


def check_reporters(arguments: Any) -> None:
    """Refuse a logger that transformers does not know, or whose package is missing."""
    for name in arguments.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise RecipeError(
                f"trainer.report_to: {name!r} is unknown"
                f"{did_you_mean(name, INTEGRATION_TO_CALLBACK)}"
            )
        packages = REPORTERS.get(name, (name,))
        if not any(map(importlib.util.find_spec, packages)):
            raise DependencyError(
                f"trainer.report_to: {name!r}: {packages[0]} is not installed; pip install "
                f"{packages[0]}, or choose another logger ('none' for none)"
            )


def check_optimizer(recipe: Recipe, arguments: Any) -> None:
    """Refuse options that the optimizer does not read, or cannot."""
    given = recipe.trainer.get("optim_args")

    def options(optim_args: Any) -> Any:
        changed = copy.copy(arguments)
        changed.optim_args = optim_args
        return Trainer.get_optimizer_cls_and_kwargs(changed)[1]

    try:
        without = options(None)
    except (ValueError, ImportError):  # not installed, or made for layers: built with the model
        return
    key = f"trainer.optim_args: {given!r}"
    try:
        unread = given is not None and options(given) == without
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"{key} cannot be used here: {in_one_line(error)}; leave it out"
        ) from error
    if unread:
        raise RecipeError(f"{key} has no effect with optim {arguments.optim.value}; leave it out")
    if recipe.trainer.get("optim_target_modules") is not None:
        raise RecipeError(
            f"trainer.optim_target_modules: has no effect with optim {arguments.optim.value}; "
            "leave it out"
        )


def check_start(start: Start) -> None:
    """Refuse what the opened checkpoint rules out, and fetch the data of its evaluation."""
    check_copied(start)
    check_continued(start)
    check_selection(start)
    check_terms(start)
    check_bias(start)
    check_packed(start)
    check_rollouts(start.recipe, start.family)
    check_replay(start.recipe, start.family)
    tell_of_router(start)
    check_evaluation(start)


def check_copied(start: Start) -> None:
    """Refuse now what cannot be copied at the end; warn of a stored head that nothing reads."""
    for line in () if start.checkpoint is None else stale_head(start.checkpoint, start.adapted):
        log.warning("%s", line)
    if start.recipe.export.merge or not start.adapted:
        carried_files(start.folder)


def check_selection(start: Start) -> None:
    """Refuse a selection that may have numbered the experts before they were pruned."""
    lora, places = start.recipe.lora, start.family.places(start.config)
    if lora is None or not isinstance(lora.experts, str) or lora.experts == "all":
        return
    if not (start.folder / PRUNED).is_file():
        return
    selection = ExpertSelection.read(lora.experts)
    selection.check(start.family.model_type, places.moe_layers, places.num_experts, pruned=True)


def check_continued(start: Start) -> None:
    """Refuse an adapter to go on from that does not fit the base."""
    lora = start.recipe.lora
    if lora is not None and lora.start is not None:
        if start.checkpoint is None:
            raise RecipeError(
                "lora.start: an adapter needs the base that it was trained on, but model.init is "
                "random; leave one of them out"
            )
        check_adapter(lora.start, start.checkpoint)


def check_terms(start: Start) -> None:
    """Refuse losses that this model cannot have."""
    facts = config_facts(start.config, start.family)
    if facts.num_experts < 2:
        raise UnsupportedModelError(
            f"{start.folder}: its MoE layers have one expert, so there is no routing to train or "
            "measure; train it as a dense model, with TRL"
        )
    method = start.recipe.method
    Objective(method.terms, facts)
    if method.router_gradient == "dense":
        check_dense(start.family, facts, method.dense_sample)


def check_bias(start: Start) -> None:
    """Refuse a trained bias that the export has no place for."""
    recipe, method = start.recipe, start.recipe.method
    exported = method.export_bias == "write" and (recipe.export.merge or not start.adapted)
    if method.bias_update is not None and exported:
        try:
            bias_config(start.family, start.config.to_dict())
        except UnsupportedModelError as problem:
            raise RecipeError(
                f"method.bias_update: {problem}. In a recipe, set method.export_bias: drop, or "
                "export.merge: false with an adapter"
            ) from None


def check_packed(start: Start) -> None:
    """Refuse to pack rows of a family that lets them see each other."""
    data = start.recipe.data
    if data.packing and data.packing_strategy != "wrapped":
        check_packing(start.config, start.family)


def tell_of_router(start: Start) -> None:
    """Say what training routers and gates in full means for the adapter."""
    recipe = start.recipe
    trained = {"router.train": recipe.router.train}
    if recipe.lora is not None:
        trained["lora.shared_expert_gate"] = recipe.lora.shared_expert_gate
    for key, how in trained.items():
        if how == "full" and start.adapted:
            log.info(
                "%s: full: vLLM serves this run's adapter only after a merge; to serve it "
                "unmerged over the base, set %s to lora or frozen",
                key,
                key,
            )
    if recipe.router.train == "frozen" and not recipe.method.trains_routers:
        log.info("router.train: frozen: no loss of the method trains routers")


def check_evaluation(start: Start) -> None:
    """Fetch and check the suite's data now, with the tokenizer that the result will have."""
    if (section := start.recipe.evaluation) is not None:
        suite = load_suite(section.suite)
        suite = suite if section.only is None else select(suite, section.only)
        for line in ready_lines(suite, section.data_dir):
            line.check_tokenizer(start.tokenizer)


def in_one_line(error: Exception) -> str:
    """An error's message in one line, or the name of its type."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
