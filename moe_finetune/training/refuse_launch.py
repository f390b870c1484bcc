"""Refuse launchers and trainers that are incompatible with the losses, before the first step."""

import logging
import os
from typing import Any

import torch

from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.lora.targets import adapts
from moe_finetune.recipe.conflicts import SELECT_FIRST
from moe_finetune.recipe.method import Method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training import ranks

log = logging.getLogger(__name__)
OWN_BALANCE_LOSS = (
    "the trainer adds the checkpoint's own load-balancing loss (router_aux_loss_coef); pass "
    "router_aux_loss_coef=0.0 to the trainer's config; presets with load_balance, such as aux_loss "
    "and orthogonal_variance, balance in its place"
)
_FP16 = "fp16 scales the trainer's loss but not the added terms; train in bf16"


def launched_by(name: str) -> bool:
    """Whether accelerate's launcher set ``ACCELERATE_USE_<name>``."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true", "yes")


def expert_ranks(recipe: Recipe) -> int:
    """Number of ranks that share the experts of the recipe's model."""
    spread = recipe.parallel.experts
    return ranks.world_size() if spread == "all" else spread


def check_whole_rows(args: Any = None) -> None:
    """Refuse context parallelism: losses are means over whole rows, but a rank has parts of
    them.
    """
    config: Any = getattr(args, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        of_launcher = 1
        if launched_by("PARALLELISM_CONFIG"):
            of_launcher = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        size = max(getattr(config, name, 1), of_launcher)
        if size > 1:
            raise ObjectiveError(
                f"parallelism_config: {name} is {size}, but the losses and metrics need whole rows "
                "on each process; set it to 1 in the accelerate config, and shard with FSDP2 "
                "(recipes/hardware/fsdp2_8gpu.yaml)"
            )


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
    lora = recipe.lora
    if launched_by("FSDP") and lora is not None and not isinstance(lora.experts, str):
        raise RecipeError(
            "lora.experts: is measured with the whole model on each device, which FSDP divides; "
            + SELECT_FIRST
        )
    if launched_by("FSDP") and _has_reference(recipe):
        # Accelerate broadcasts what rank 0 read to the trained model alone: of a reference, the
        # other ranks would have zeros.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        if recipe.trainer.get("sync_ref_model"):
            _check_moving_reference()
    if spread > 1:
        load_on_each_rank(f"parallel.experts: {spread}", "leave the key out")
    if recipe.parallel.experts == "all" and spread == 1:
        log.warning(
            "parallel.experts: all, but only one process was started, so experts are not spread"
        )


def _has_reference(recipe: Recipe) -> bool:
    """Whether the stage has a second model to measure from, as it has without an adapter."""
    if adapts(recipe.lora, recipe.router.train):
        return False
    stage = STAGES[recipe.stage]
    return stage.reference or (stage.form == "prompts" and bool(recipe.trainer.get("beta")))


def _check_moving_reference() -> None:
    """Refuse shards of the reference that do not meet the policy's parameter by parameter."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        problem = "FSDP1, whose flat parameters do not match one by one; set fsdp_version: 2"
    elif os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        problem = (
            "fsdp_reshard_after_forward: false, which leaves the reference whole after a forward, "
            "while the policy is in shards; set it to true"
        )
    else:
        return
    raise RecipeError(
        f"trainer.sync_ref_model cannot be combined with {problem} in the accelerate config "
        "(recipes/hardware/fsdp2_8gpu.yaml is one), or leave the key out"
    )


def load_on_each_rank(setting: str, otherwise: str) -> None:
    """Prepare FSDP2 for ``setting``: each process reads its own weights; refuse other sharding.

    Accelerate's loading on rank 0 would broadcast float values, and rank 0's experts to all.
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


def check_arguments(args: Any, method: Method, config: Any) -> None:
    """Refuse arguments of a trainer that would change the method's gradients."""
    if args.fp16 or getattr(args, "mixed_precision", "") == "fp16":
        raise ObjectiveError(_FP16)
    check_whole_rows(args)
    # As in TRL's trainers, None means the checkpoint's own coefficient.
    coefficient: Any = getattr(args, "router_aux_loss_coef", 0.0)
    if coefficient is None:
        coefficient = getattr(config, "router_aux_loss_coef", None)
    if hasattr(config, "output_router_logits") and (config.output_router_logits or coefficient):
        raise ObjectiveError(OWN_BALANCE_LOSS)
    smoothing: float = getattr(args, "label_smoothing_factor", 0.0)
    if method.token_mask == "labels" and smoothing:
        raise ObjectiveError(
            "method.token_mask: labels with label_smoothing_factor: the trainer then removes "
            "the labels before it calls the model; set label_smoothing_factor: 0, or use "
            "token_mask: attention"
        )


def check_equal_steps(dataloader: Any) -> None:
    """Refuse ranks with different numbers of batches: the longest would wait forever."""
    try:
        batches = len(dataloader)
    except TypeError:
        batches = -1  # unsized: max_steps ends all ranks alike
    if not ranks.equal_on_ranks(batches):
        raise ObjectiveError(
            f"the ranks have different numbers of batches (this one {batches}); give each rank "
            "the same number, or let accelerate shard one dataset (even_batches: true)"
        )


def check_forward(config: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    """Refuse a training forward of the backbone that adds its own balance loss."""
    if (
        torch.amp.is_autocast_available(device.type)
        and torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) == torch.float16
    ):
        raise ObjectiveError(_FP16)
    output_logits = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if output_logits is None else output_logits:
        raise ObjectiveError(
            "the model is called with output_router_logits, so it or its trainer adds the "
            "checkpoint's own load-balancing loss; turn that off (router_aux_loss_coef=0.0 in "
            "TRL's configs); presets with load_balance, such as aux_loss and orthogonal_variance, "
            "balance in its place"
        )
