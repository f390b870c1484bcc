"""An optimizer's unsharded state by parameter name, as plain values and tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from moe_finetune.errors import CheckpointError
from moe_finetune.training import ranks
from moe_finetune.training.full_weights import like, plain_name


def optimizer_state(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return ``{"groups": [...], "state": {parameter: {...}}}``; empty except on rank 0.

    Every rank must call this, because it gathers. Unsharded CPU tensors are not copied.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    complete = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered: Any = get_optimizer_state_dict(model, inner, options=complete)
    if ranks.rank() > 0:
        return {"groups": [], "state": {}}
    return {"groups": gathered["param_groups"], "state": gathered["state"]}


def sharded_state(optimizer: Any, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Like :func:`optimizer_state` without sharded tensors, and this rank's shards of those.

    Shards are named ``parameter/key``. Every rank must call this; the first result is equal on all.

    Raises:
        CheckpointError: the optimizer's state is not sharded like its parameter.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    state: Any = get_optimizer_state_dict(model, inner)
    moments: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, entry in state["state"].items():
        scalars[name] = {}
        for key, value in entry.items():
            if hasattr(value, "device_mesh"):
                moments[f"{name}/{key}"] = value
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"{type(inner).__name__} keeps a different '{key}' of {name} on every rank, "
                    "which cannot be saved; use trainer.optim: adamw_torch"
                )
            else:
                scalars[name][key] = value
    return {"groups": state["param_groups"], "state": scalars}, moments


def empty_moments(
    model: nn.Module, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Empty tensors with :func:`sharded_state`'s names and shards, to read a checkpoint into.

    A tensor with its parameter's shape is sharded like it.
    """
    parameters = {name: p for p, name in _names(model).items()}
    moments = {}
    for name, (shape, dtype) in shapes.items():
        like_it = parameters.get(name.rpartition("/")[0])
        if like_it is not None and like_it.shape == shape:
            moments[name] = torch.empty_like(like_it, dtype=dtype, requires_grad=False)
        else:
            moments[name] = torch.empty(shape, dtype=dtype)
    return moments


def load_optimizer_state(
    optimizer: Any, model: nn.Module, saved: dict[str, Any], where: str
) -> None:
    """Restore what :func:`optimizer_state` returned.

    Raises:
        CheckpointError: the saved groups contain other parameters than this optimizer's.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    names = _names(model)
    names_by_group = [[names[p] for p in group["params"]] for group in inner.param_groups]
    if [group["params"] for group in saved["groups"]] != names_by_group:
        raise CheckpointError(
            f"{where}: its optimizer trained other parameters than this run; resume with the "
            "recipe that wrote it"
        )
    order = [p for group in inner.param_groups for p in group["params"]]
    index = {p: i for i, p in enumerate(order)}
    state = {
        index[p]: {
            key: _placed(p, value) if isinstance(value, Tensor) else value
            for key, value in saved["state"][names[p]].items()
        }
        for p in order
        if names[p] in saved["state"]
    }
    groups = [
        {**group, "params": [index[p] for p in group_state["params"]]}
        for group, group_state in zip(saved["groups"], inner.param_groups, strict=True)
    ]
    inner.load_state_dict({"state": state, "param_groups": groups})


def _placed(parameter: Tensor, value: Tensor) -> Tensor:
    """Shard a moment like its parameter; leave a step counter as one number."""
    is_whole = not hasattr(value, "device_mesh") and value.shape == parameter.shape
    return like(parameter, value) if is_whole else value


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {p: plain_name(name) for name, p in model.named_parameters()}


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without shared memory, as safetensors files require.

    8-bit optimizers share one table among all parameters.
    """
    seen: set[int] = set()
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        copies[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return copies
