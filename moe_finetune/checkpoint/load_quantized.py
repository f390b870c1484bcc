"""Load a checkpoint tensor by tensor into a model whose large weights are quantized.

The model is built without weights; each tensor is then read, quantized where
:mod:`moe_finetune.moe.quantized_model` says so, and put into its place. Expert stacks are read one
expert's matrix at a time, so that loading needs little more memory than the quantized model.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.fit import places_on_disk
from moe_finetune.checkpoint.stored import PlainTensors, Stored, Transposed
from moe_finetune.checkpoint.tensors import DTYPES
from moe_finetune.checkpoint.values import finite
from moe_finetune.errors import CheckpointError, RecipeError, UnsupportedModelError
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.models import Family, family_of
from moe_finetune.models.structure import class_of, pieces_on_disk
from moe_finetune.moe.quantized_model import quantized_names
from moe_finetune.quantization.codec import Kind
from moe_finetune.quantization.weight import QuantizedWeight, quantized

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


log = logging.getLogger(__name__)


def load_quantized(
    checkpoint: Checkpoint,
    kind: Kind | None,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    expert_ranks: int = 1,
    attn_implementation: str | None = None,
    **unknown: Any,
) -> PreTrainedModel:
    """Load the model of a checked checkpoint with large weights in ``kind``; see ``load_model``.

    A quantized checkpoint is dequantized tensor by tensor, also when ``kind`` is None. With experts
    spread over ranks, each rank reads and quantizes only its part.

    Raises:
        RecipeError: quantized loading does not support an option of ``from_pretrained``.
    """
    if unknown:
        raise RecipeError(
            f"{next(iter(unknown))}: cannot be combined with quantization; leave one of them out"
        )
    folder, config = checkpoint.folder, copy.deepcopy(checkpoint.model_config)
    if isinstance(dtype, str):
        dtype = stored_dtype(checkpoint.tensors) if dtype == "auto" else getattr(torch, dtype)
    named = str(dtype).removeprefix("torch.")
    stored: Stored = PlainTensors(checkpoint.tensors)
    if checkpoint.quantized is not None:
        stored = checkpoint.quantized
        log.warning("%s is stored as %s and is dequantized while it loads", folder, stored.format)
    if kind is not None:
        log.info(
            "experts and linear layers are stored as %s in memory; routers, norms, embeddings "
            "and the language-model head stay %s",
            kind,
            named,
        )
    device, family = _one_device(device_map), checkpoint.family
    if family.disk.interleaved:
        raise UnsupportedModelError(
            f"{folder}: {family.title} cannot be loaded tensor by tensor: its files interleave "
            "the rows of gate and up; load it without quantization"
        )
    if family.disk.either and family.disk.transposed:
        stored = Transposed(stored, family)
    return load_streaming(
        folder,
        config,
        stored,
        kind,
        dtype,
        device,
        attn_implementation,
        family=family,
        expert_ranks=expert_ranks,
    )


def _one_device(device_map: Any) -> torch.device:
    if isinstance(device_map, dict) and len(set(device_map.values())) == 1:
        device_map = next(iter(device_map.values()))
    if device_map in (None, "auto"):
        gpu = torch.cuda.is_available()
        device_map = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    if not isinstance(device_map, str | int | torch.device):
        raise RecipeError(
            f"device_map: {device_map!r} spreads the model, but a quantized model must be on one "
            "device"
        )
    return torch.device(device_map)


def load_streaming(
    folder: Path,
    config: PreTrainedConfig,
    stored: Stored,
    kind: Kind | None,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    family: Family | None = None,
    expert_ranks: int = 1,
) -> PreTrainedModel:
    """Load the causal language model of ``config``, its large weights in ``kind``, in eval mode.

    Args:
        folder: the checkpoint's folder, which becomes the model's name.
        kind: number format; None keeps every weight in ``dtype``.
        dtype: of unquantized weights, and of quantized ones after dequantization.
        attn_implementation: as in ``from_pretrained``.
        family: the family of ``config``, with the layout of these files.
        expert_ranks: how many ranks share the routed experts.

    Raises:
        UnsupportedModelError: no tensor of the files gives a parameter of the model.
    """
    family = family or family_of(config)
    model = skeleton(config, dtype, attn_implementation)
    if expert_ranks > 1:
        from moe_finetune.moe.spread import place_experts

        model = place_experts(model, expert_ranks, torch.device(device or "cpu").type)
    names = quantized_names(model, family) if kind is not None else frozenset()
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tied = set(model.all_tied_weights_keys or ())
    # Tensors are filled one by one, so that only one is in memory twice.
    for name, places in places_on_disk(shapes, family, config):
        if name in tied:
            continue
        disk = [disk_name for disk_name, _ in places]
        if disk == [name] and name not in stored:
            disk = _pieces(config, name, shapes[name], family)
        if any(disk_name not in stored for disk_name in disk):
            raise UnsupportedModelError(
                f"{folder}: {family.title} cannot be loaded tensor by tensor: '{name}' is not "
                "stored as a separate tensor; load it without quantization"
            )
        target, experts = state[name], None
        if hasattr(
            target, "device_mesh"
        ):  # a stack that transformers' parallel plan spreads over ranks
            rank, ranks = target.device_mesh.get_local_rank(), target.device_mesh.size()
            count = shapes[name][0]
            experts = range(count * rank // ranks, count * (rank + 1) // ranks)
        if kind is not None and name in names:
            value: Tensor = _quantized(
                shapes[name], disk, stored, kind, target.dtype, device, experts
            )
        else:
            value = _plain(shapes[name], disk, stored, target.dtype, device, experts)
        _set(model, name, value)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name not in state:
            _set(model, name, buffer.to(device))
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled:
        raise UnsupportedModelError(
            f"{folder}: {family.title} cannot be loaded tensor by tensor: no tensor fills "
            f"'{unfilled[0]}'; load it without quantization"
        )
    model.name_or_path = str(folder)
    _read_generation_config(model, folder)
    model.requires_grad_(True)
    for parameter in model.parameters():
        if quantized(parameter):
            parameter.requires_grad_(False)
    return model.eval()


def skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None = None
) -> Any:
    """The model of ``config`` with parameters on the meta device, in a loaded model's dtypes.

    Buffers are real, because constructors compute some that no file contains.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = class_of(config).from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    plan = {name.replace("*", ".*"): wide for name, wide in model._get_dtype_plan(dtype).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for pattern, wide in plan.items():
            if re.search(pattern, name) and tensor.dtype != wide:
                tensor.data = tensor.data.to(wide)
    return model


def _quantized(
    shape: tuple[int, ...],
    places: list[str],
    stored: Stored,
    kind: Kind,
    dtype: torch.dtype,
    device: Any,
    experts: range | None,
) -> QuantizedWeight:
    """Quantize a weight, or only ``experts`` of a stack, reading one matrix at a time."""
    if len(shape) == 2:
        weight = QuantizedWeight.empty(shape, kind, dtype, device)
        (name,) = places
        weight.store(0, _placed(name, stored.read(name), dtype, device))
        return weight
    experts = range(shape[0]) if experts is None else experts
    weight = QuantizedWeight.empty((len(experts), *shape[1:]), kind, dtype, device)
    for slot, expert in enumerate(experts):
        if len(places) == 1:
            name, matrix = places[0], stored.read_expert(places[0], expert)
        else:
            name, *_ = names = _places_of(expert, places, shape)
            matrix = torch.cat([stored.read(piece) for piece in names])
        weight.store(slot, _placed(name, matrix, dtype, device))
    return weight


def _plain(
    shape: tuple[int, ...],
    places: list[str],
    stored: Stored,
    dtype: torch.dtype,
    device: Any,
    experts: range | None,
) -> Tensor:
    """Read an unquantized weight, its pieces stacked by rows, or only ``experts`` of a stack."""
    if len(places) == 1:
        tensor = stored.read(places[0]).view(shape)
        if experts is not None:
            tensor = tensor[experts.start : experts.stop]
        return _placed(places[0], tensor, dtype, device)
    if experts is not None:
        places = [name for expert in experts for name in _places_of(expert, places, shape)]
        shape = (len(experts), *shape[1:])
    tensor = torch.empty(shape, dtype=dtype, device=device)
    flat, first = tensor.view(-1), 0
    for name in places:
        piece = _placed(name, stored.read(name), dtype, device).reshape(-1)
        flat[first : first + piece.numel()] = piece
        first += piece.numel()
    return tensor


def _places_of(expert: int, places: list[str], shape: tuple[int, ...]) -> list[str]:
    """The tensors in the files that make up one expert of a stack."""
    parts = len(places) // shape[0]
    return places[expert * parts : (expert + 1) * parts]


def _pieces(
    config: PreTrainedConfig, name: str, shape: tuple[int, ...], family: Family
) -> list[str]:
    """The tensors in the files that are stacked in ``name``; itself if there are none."""
    pieces = pieces_on_disk(config.to_dict(), name, family.disk.spelling)
    same = {piece[1:] for piece in pieces.values()} == {shape[1:]}
    return list(pieces) if same and sum(p[0] for p in pieces.values()) == shape[0] else [name]


def _placed(name: str, tensor: Tensor, dtype: torch.dtype, device: Any) -> Tensor:
    """Cast a finite tensor of the files to ``dtype``, in which it must stay finite."""
    placed = tensor.to(device=device, dtype=dtype)
    narrower = tensor.is_floating_point() and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not finite(placed):
        raise CheckpointError(
            f"'{name}' has values that overflow {dtype}; use a wider model.dtype".replace(
                "torch.", ""
            )
        )
    return placed


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter or buffer ``name``, or this rank's part of it, by ``value``."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        target: Any = module._parameters[leaf]
        if hasattr(target, "device_mesh"):
            mesh, placements = target.device_mesh, target.placements
            value = DTensor.from_local(
                value, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
            )
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The float dtype of most stored numbers."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        if info.dtype in DTYPES:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
    return DTYPES[max(sizes, key=lambda name: sizes[name])] if sizes else torch.bfloat16
