"""Whole tensors of a model whose parameters may be sharded over ranks (FSDP2).

All ranks call these functions, with the same parameters in the same order: gathering is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from moe_finetune.errors import CheckpointError


def whole(tensor: Any, name: str = "tensor") -> Tensor:
    """``tensor`` complete, on the CPU, as a copy that shares nothing; checked when gathered.

    Raises:
        CheckpointError: the gathered tensor is not the sum of its shards: a shard got lost.
    """
    tensor = tensor.detach()
    if not hasattr(tensor, "full_tensor"):
        return tensor.to("cpu", copy=True).contiguous()
    full = tensor.full_tensor()
    if full.shape != tensor.shape:
        raise CheckpointError(f"{name}: gathered {tuple(full.shape)}, wanted {tuple(tensor.shape)}")
    if full.is_floating_point() and all(p.is_shard() for p in tensor.placements):
        local = tensor.to_local().double().square().sum()
        for dimension in range(tensor.device_mesh.ndim):
            distributed.all_reduce(local, group=tensor.device_mesh.get_group(dimension))
        if not torch.isclose(full.double().square().sum(), local, rtol=1e-9, equal_nan=True):
            raise CheckpointError(f"{name}: the gathered tensor lacks a rank's shard")
    return full.to("cpu", copy=True).contiguous()


def fill(target: Tensor, value: Tensor) -> None:
    """Copy the whole ``value`` into ``target``, which may be one rank's part of a sharded one."""
    with torch.no_grad():
        target.copy_(like(target, value))


def like(target: Any, value: Tensor) -> Tensor:
    """``value`` on ``target``'s device, sharded as it is; the type stays ``value``'s."""
    if not hasattr(target, "device_mesh"):
        return value.to(target.device)
    from torch.distributed.tensor import distribute_tensor

    mesh = target.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, target.placements)


def plain_name(name: str) -> str:
    """A parameter's name without what compiling, checkpointing and wrapping put into it."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def live_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, under the names a checkpoint has; not copied.

    An adapted model gives PEFT's names of its active adapter, any other its trainable parameters.
    """
    from peft import PeftModel

    model = getattr(model, "module", model)
    if isinstance(model, PeftModel):
        from peft import get_peft_model_state_dict

        return {
            plain_name(k): v
            for k, v in get_peft_model_state_dict(
                model, adapter_name=model.active_adapter, save_embedding_layers=False
            ).items()
        }
    return {plain_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """:func:`live_weights` as complete copies on the CPU."""
    return {name: whole(tensor, name) for name, tensor in live_weights(model).items()}


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Put ``weights`` back into the model.

    Raises:
        CheckpointError: names or shapes are not the model's; ``where`` is named.
    """
    live = live_weights(model)
    _same_names(live, weights, where)
    for name, target in live.items():
        if target.shape != weights[name].shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(weights[name].shape)}, and the model's has "
                f"{tuple(target.shape)}; it belongs to another recipe"
            )
        fill(target, weights[name])


def _same_names(live: Iterable[str], held: Iterable[str], where: str) -> None:
    missing, extra = sorted(set(live) - set(held)), sorted(set(held) - set(live))
    if missing or extra:
        shown: Any = (missing or extra)[0]
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing and {len(extra)} are unknown (first: "
            f"{shown}); it belongs to another recipe"
        )
