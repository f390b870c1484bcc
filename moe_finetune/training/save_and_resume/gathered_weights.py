"""Whole tensors of a model whose parameters may be sharded over ranks (FSDP2), only on rank 0.

Every rank must call these functions, because gathering is collective. The other ranks hold one
gathered tensor at a time; only rank 0, which writes the files, keeps them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from moe_finetune.errors import CheckpointError
from moe_finetune.models import find_family
from moe_finetune.models.class_structure import part_of
from moe_finetune.training import ranks


def like(target: Any, value: Tensor) -> Tensor:
    """``value`` on ``target``'s device and sharded like it; the dtype is unchanged."""
    if not hasattr(target, "device_mesh"):
        return value.to(target.device)
    from torch.distributed.tensor import distribute_tensor

    mesh = target.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, target.placements)


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of compiling, checkpointing and wrapping."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, by their names in a checkpoint; empty except on rank 0.

    For an adapted model, the active adapter under PEFT's names; for any other, its trainable
    parameters. Unsharded tensors on the CPU are not copied: write them before the next step.
    """
    model = getattr(model, "module", model)
    gathered = _gathered(model, ignore_frozen_params=True)
    return _trained(model, gathered) if ranks.rank() == 0 else {}


def whole_model(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every parameter, in ``dtype`` if given, and every buffer; empty except on rank 0.

    Buffers keep their dtype: a router's correction bias must stay float32 to separate close scores.
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
    """The part of a model's ``state`` that trains, by its names in a checkpoint."""
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
    """Like :func:`trained_weights`, but with this rank's tensors, still sharded."""
    model = getattr(model, "module", model)
    state = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    return _trained(model, state)


def model_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """``model``'s trained tensors from an ordinary checkpoint, whole, on the CPU."""
    from transformers import AutoModelForCausalLM

    from moe_finetune.checkpoint.load_model import load_model

    inner: Any = getattr(model, "module", model)
    # Dense models, which become experts of a mixture, have no family.
    of_family = find_family(inner.config.model_type, part_of(inner.config)) is not None
    read: Any = load_model if of_family else AutoModelForCausalLM.from_pretrained
    state = read(folder, dtype="float32", device_map="cpu").state_dict()
    return {name: state[name] for name in live_weights(model) if name in state}


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Put the tensors that train back into the model, as :func:`trained_weights` has them."""
    _copy_into(live_weights(model), weights, where)


def set_whole_model(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Put back every parameter and buffer, as :func:`whole_model` has them."""
    state = getattr(model, "module", model).state_dict()
    _copy_into({plain_name(name): tensor for name, tensor in state.items()}, weights, where)


def _copy_into(live: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: str) -> None:
    if live.keys() != weights.keys():
        missing, extra = sorted(live.keys() - weights.keys()), sorted(weights.keys() - live.keys())
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing and {len(extra)} are unknown (first: "
            f"{[*missing, *extra][0]}); resume with the recipe that wrote it"
        )
    for name, target in live.items():
        value = weights[name]
        if target.shape != value.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(value.shape)}, but the model's has "
                f"{tuple(target.shape)}; resume with the recipe that wrote it"
            )
        with torch.no_grad():
            target.copy_(like(target, value))
