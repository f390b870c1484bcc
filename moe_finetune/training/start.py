"""The start of a run: its checkpoint and tokenizer, opened once, and the model that trains."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import AdapterError
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.preconditions import expert_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.models import Family

log = logging.getLogger(__name__)


def base_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's checkpoint, at its revision if it is on the hub."""
    from moe_finetune.models.loading import local_folder

    weights = recipe.model.init == "checkpoint"
    return local_folder(recipe.model.path, weights, recipe.model.revision)


@dataclass(frozen=True)
class Start:
    """The start of training, opened once and used for checks, model, plan and metadata.

    Attributes:
        folder: the base checkpoint's folder.
        config: transformers' config of the trained model.
        tokenizer: as its files define it; saved with the trained weights.
        checkpoint: the base's tensors by name; None for random weights.
    """

    recipe: Recipe
    folder: Path
    config: Any
    family: Family
    tokenizer: Any
    checkpoint: Checkpoint | None

    @property
    def base(self) -> Path | Checkpoint:
        """The opened base if its weights are used, else its folder."""
        return self.folder if self.checkpoint is None else self.checkpoint

    @property
    def adapted(self) -> bool:
        """Whether an adapter trains instead of the model's own weights."""
        from moe_finetune.lora.targets import adapts

        return adapts(self.recipe.lora, self.recipe.router.train)


def open_start(recipe: Recipe) -> Start:
    """Open the recipe's checkpoint and tokenizer; read and check every tensor.

    Raises:
        CheckpointError, UnsupportedModelError: see
            :func:`~moe_finetune.checkpoint.open.open_checkpoint`.
        RecipeError: ``model.config`` does not fit the checkpoint's.
    """
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models import check_supported
    from moe_finetune.models.fresh import check_vocabulary, fresh_config
    from moe_finetune.models.loading import load_tokenizer

    folder = base_folder(recipe)
    tokenizer_path = recipe.model.tokenizer or folder
    if recipe.model.init == "random":
        config, family = fresh_config(folder, recipe.model.config)
        tokenizer = load_tokenizer(tokenizer_path)
        check_vocabulary(config, tokenizer, tokenizer_path)
        return Start(recipe, folder, config, family, tokenizer, None)
    checkpoint = open_checkpoint(folder, values=True, stored=True)
    config = checkpoint.model_config
    check_supported(config, checkpoint.family)
    tokenizer = load_tokenizer(tokenizer_path)
    return Start(recipe, folder, config, checkpoint.family, tokenizer, checkpoint)


def start_model(start: Start) -> Any:
    """The model that training starts from, with the checkpoint's weights or random ones.

    Without LoRA all weights train in float32, because updates at usual learning rates are below the
    resolution of bfloat16; the trainer then computes in ``model.dtype``.
    """
    from moe_finetune.checkpoint.load import load_model
    from moe_finetune.models import opened_as
    from moe_finetune.models.fresh import fresh_model

    recipe, attention = start.recipe, start.recipe.model.attn_implementation
    if start.checkpoint is None:
        return opened_as(start.family, fresh_model(start.config, recipe.seed, attention))
    return load_model(
        start.checkpoint,
        dtype=recipe.model.dtype if recipe.lora is not None else "float32",
        quantization=recipe.model.quantization,
        expert_ranks=expert_ranks(recipe),
        attn_implementation=attention,
    )


def trainable_model(start: Start) -> Any:
    """The model with its adapter before training: new factors, or those of ``lora.start``."""
    from transformers import set_seed

    from moe_finetune.lora.coverage import lora_coverage
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.moe.offload import offload_experts

    recipe = start.recipe
    model = start_model(start)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    if start.checkpoint is not None and recipe.lora is not None and recipe.lora.start is not None:
        continue_adapter(model, Path(recipe.lora.start), start.checkpoint)
    if recipe.model.offload == "experts":
        offload_experts(model)
    log.debug("LoRA coverage\n%s", lora_coverage(model).table())
    return model


def continue_adapter(model: Any, path: Path, checkpoint: Checkpoint) -> None:
    """Copy an adapter's weights into the new factors that ``add_lora`` gave ``model``.

    The model then computes the same as base and adapter. If the adapter's rank is lower than the
    recipe's, the remaining directions start fresh; so do factors on parts that it does not adapt.

    Args:
        path: the adapter's folder, written by any program.
        checkpoint: the base model that the adapter was trained on.

    Raises:
        AdapterError: it adapts or replaces parts that the recipe does not, or has a higher rank.
    """
    from peft.tuners.lora.layer import LoraLayer

    from moe_finetune.checkpoint.adapter import PREFIX, open_adapter
    from moe_finetune.checkpoint.files import read_tensor
    from moe_finetune.checkpoint.packings import as_peft
    from moe_finetune.checkpoint.updates import check_adapter, read_updates
    from moe_finetune.training.full_weights import live_weights

    with tempfile.TemporaryDirectory() as scratch:
        written = as_peft(check_adapter(path, checkpoint), checkpoint, Path(scratch), True)
        adapter = open_adapter(written)
        scales = {update.a: update.scale for update in read_updates(adapter, checkpoint).low_rank}
        tensors = {key: read_tensor(info).float() for key, info in adapter.tensors.items()}
    live = {
        name.removeprefix(PREFIX): tensor.detach() for name, tensor in live_weights(model).items()
    }
    for name, module in model.named_modules():
        key = name.removeprefix(PREFIX)
        if not isinstance(module, LoraLayer) or f"{key}.lora_A.weight" not in tensors:
            continue
        a, b = (tensors.pop(f"{key}.lora_{factor}.weight") for factor in "AB")
        experts: Any = getattr(module, "num_experts", 1)
        rank, target_rank = a.shape[0] // experts, module.r[model.active_adapter]
        if rank > target_rank:
            raise AdapterError(
                f"{path}: '{key}' has rank {rank}, but the recipe gives it {target_rank}; set "
                f"lora.rank or lora.parts to {rank} or more"
            )
        scale = scales[f"{key}.lora_A.weight"] / module.scaling[model.active_adapter]
        # PEFT packs A as (experts x rank, inputs), and B as (outputs, rank x experts).
        target: Tensor = live[f"{key}.lora_A.weight"].view(experts, target_rank, -1)
        target[:, :rank] = a.view(experts, rank, -1).to(target)
        target = live[f"{key}.lora_B.weight"]
        target = target.view(len(target), target_rank, experts)
        target[:, :rank] = (b * scale).reshape(len(target), rank, experts).to(target)
    for key in list(tensors):
        if key in live and live[key].shape == tensors[key].shape:
            live[key].copy_(tensors.pop(key))
    if tensors:
        raise AdapterError(
            f"{path}: has '{next(iter(tensors))}' ({len(tensors)} such tensors), which the recipe "
            "does not train; add its part to lora.targets or set router.train, or merge the "
            "adapter and train from the merged checkpoint"
        )
