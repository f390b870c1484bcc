"""Whole tensors of a model whose parameters may be sharded over ranks (FSDP2), only on rank 0.

All ranks call these functions, because gathering is collective; one tensor at a time passes through
the others' memory, and only rank 0, which writes files, keeps what was gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from moe_finetune.errors import CheckpointError
from moe_finetune.training import ranks


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


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, under the names a checkpoint has; empty past rank 0.

    An adapted model gives PEFT's names of its active adapter, any other its trainable parameters.
    What lies whole on the CPU already is not copied: write it before the next step.
    """
    model = getattr(model, "module", model)
    gathered = _gathered(model, ignore_frozen_params=True)
    return _trained(model, gathered) if ranks.rank() == 0 else {}


def whole_model(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every parameter, as ``dtype`` (or its own), and every buffer, as it is; empty past rank 0.

    A buffer is a router's correction bias, which decides between close scores in float32.
    """
    buffers = {plain_name(name) for name, _ in model.named_buffers()}
    gathered = _gathered(getattr(model, "module", model))
    names = list(gathered) if ranks.rank() == 0 else []
    state = {}
    for name in names:  # one float32 tensor less for each that is converted
        tensor = gathered.pop(name)
        state[name] = tensor if dtype is None or name in buffers else tensor.to(dtype)
    return state


def _gathered(model: nn.Module, **options: Any) -> dict[str, Any]:
    complete = StateDictOptions(full_state_dict=True, cpu_offload=True, **options)
    return get_model_state_dict(model, options=complete)


def _trained(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """The part of a model's ``state`` that trains, under the names a checkpoint has."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(
            model,
            state_dict=state,
            adapter_name=model.active_adapter,
            save_embedding_layers=False,
        )
    trains = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trains}


def live_weights(model: nn.Module) -> dict[str, Tensor]:
    """As :func:`trained_weights`, but this rank's own tensors, sharded as they are."""
    model = getattr(model, "module", model)
    state = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    return _trained(model, state)


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Put ``weights`` back into the model.

    Raises:
        CheckpointError: names or shapes are not the model's; ``where`` is named.
    """
    live = live_weights(model)
    _same_names(live, weights, where)
    for name, target in live.items():
        value = weights[name]
        if target.shape != value.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(value.shape)}, but the model's has "
                f"{tuple(target.shape)}; resume with the recipe that wrote it"
            )
        fill(target, value)


def _same_names(live: Iterable[str], stored: Iterable[str], where: str) -> None:
    missing, extra = sorted(set(live) - set(stored)), sorted(set(stored) - set(live))
    if missing or extra:
        example: Any = (missing or extra)[0]
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing and {len(extra)} are unknown (first: "
            f"{example}); resume with the recipe that wrote it"
        )
