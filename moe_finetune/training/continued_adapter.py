"""Continue training an existing adapter, written by any program.

Shape legend: E experts (1 for a matrix), R the recipe's rank, r the adapter's, I inputs, O outputs.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import AdapterError


@torch.no_grad()
def continue_adapter(model: Any, path: Path, checkpoint: Checkpoint) -> None:
    """Copy an adapter's weights into the new factors that ``add_lora`` gave ``model``.

    The model then computes the same as base and adapter. If the adapter's rank is lower than the
    recipe's, the remaining directions start fresh; so do factors on parts that it does not adapt.

    Args:
        path: the adapter's folder.
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
    live = {name.removeprefix(PREFIX): tensor for name, tensor in live_weights(model).items()}
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
        _fill(live[f"{key}.lora_A.weight"], a, experts, rank, target_rank, in_a=True)
        _fill(live[f"{key}.lora_B.weight"], b * scale, experts, rank, target_rank, in_a=False)
    for key in list(tensors):
        if key in live and live[key].shape == tensors[key].shape:
            live[key].copy_(tensors.pop(key))
    if tensors:
        raise AdapterError(
            f"{path}: has '{next(iter(tensors))}' ({len(tensors)} such tensors), which the recipe "
            "does not train; add its part to lora.targets or set router.train, or merge the "
            "adapter and train from the merged checkpoint"
        )


def _fill(
    target: Tensor, values: Tensor, experts: int, rank: int, target_rank: int, *, in_a: bool
) -> None:
    """Copy factors of ``rank`` into the first directions of PEFT's packed ``target_rank``."""
    if in_a:
        target.view(experts, target_rank, -1)[:, :rank] = values.view(experts, rank, -1).to(target)
        return
    out_size = target.shape[0]
    view_ORE = target.view(out_size, target_rank, experts)
    view_ORE[:, :rank] = values.reshape(out_size, rank, experts).to(target)
