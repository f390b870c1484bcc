"""Initialize LoRA factors by ``lora.init``, and convert to an adapter any program can load.

PEFT's own functions initialize each matrix's factors. On a stack of experts they would read a
``weight`` that the module lacks, so each expert's matrix is passed to them separately.

PiSSA and OLoRA train on a residual ``W - s B0 A0``. The saved adapter is an ordinary one of twice
the rank on the unchanged base, ``s (B A - B0 A0)``, the same conversion as PEFT's.

Shape legend: E experts with factors (1 for a matrix), r rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from moe_finetune.errors import RecipeError
from moe_finetune.moe.lora_selected import SelectedExpertsLora

if TYPE_CHECKING:
    from peft import LoraConfig

    from moe_finetune.recipe.lora import LoraSection

_INITIAL = "_initial_factors"


@torch.no_grad()
def initialize(model: nn.Module, config: LoraConfig, lora: LoraSection) -> None:
    """Initialize PEFT's factors as ``lora.init`` says.

    With PiSSA and OLoRA the base's weights become the residual, and the initial factors stay on the
    modules for :func:`ordinary_adapter`. Factors on the meta device are unchanged.
    """
    if lora.init == "kaiming":
        return
    for _, module in _lora_layers(model):
        for name in module.lora_A:
            a_rI, b_Or = module.lora_A[name].weight, module.lora_B[name].weight
            if a_rI.device.type == "meta":
                continue
            if lora.init == "gaussian":
                module.reset_lora_parameters(name, "gaussian")
                continue
            factors = [_begun(module, name, slot, config, lora) for slot in range(_experts(module))]
            a_rI.copy_(torch.cat([a for a, _ in factors]))
            b_Or.copy_(torch.stack([b for _, b in factors], 2).flatten(1))
            if lora.changes_base:
                setattr(module, _INITIAL, (a_rI.cpu().clone(), b_Or.cpu().clone()))
    if lora.changes_base:
        # PEFT's name for it, written into checkpoints: a merge of those would be wrong.
        config.init_lora_weights = lora.init  # type: ignore[assignment]


def ordinary_adapter(
    model: nn.Module, weights: Mapping[str, Tensor], config: LoraConfig
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Tensors and config of an adapter on the unchanged base, with PEFT's names.

    Args:
        weights: the adapter's tensors, unsharded.
        config: its PEFT config; not modified.
    """
    tensors = dict(weights)
    for path, module in _lora_layers(model):
        initial = getattr(module, _INITIAL, None)
        if initial is None:
            continue
        experts = _experts(module)
        keys = [f"{path}.lora_{factor}.weight" for factor in "AB"]
        a, b = (tensors[key].cpu() for key in keys)
        a0, b0 = (first.to(now.dtype) for first, now in zip(initial, (a, b), strict=True))
        both_a = [half.view(experts, -1, a.shape[1]) for half in (a, a0)]
        both_b = [half.view(b.shape[0], -1, experts) for half in (b, -b0)]
        tensors[keys[0]] = torch.cat(both_a, 1).flatten(0, 1)
        tensors[keys[1]] = torch.cat(both_b, 1).flatten(1)
    config = deepcopy(config)
    if config.init_lora_weights is not True:
        # The scaling stays what it was while the rank doubles.
        factor = math.sqrt(2) if config.use_rslora else 2
        config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * factor  # type: ignore[assignment]
        config.rank_pattern = {key: 2 * rank for key, rank in (config.rank_pattern or {}).items()}
        alphas = config.alpha_pattern or {}
        config.alpha_pattern = {key: alpha * factor for key, alpha in alphas.items()}
        config.init_lora_weights = True
    return tensors, config


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora.layer import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path.replace("_checkpoint_wrapped_module.", ""), module


def _experts(module: Any) -> int:
    return getattr(module, "num_experts", 1)


def _begun(
    module: Any, name: str, slot: int, config: LoraConfig, lora: LoraSection
) -> tuple[Tensor, Tensor]:
    """PEFT's initial A (r, I) and B (O, r) of one matrix; may change the base's matrix."""
    from peft.tuners.lora.layer import Linear

    a: Tensor = module.lora_A[name].weight
    rank, shape_OI = module.r[name], (module.out_features, module.in_features)
    matrix_OI = _base_matrix(module, slot) if lora.changes_base else None
    if matrix_OI is not None and rank > min(shape_OI):
        raise RecipeError(
            f"lora.init: '{lora.init}' takes at most {min(shape_OI)} directions out of a matrix "
            f"of {shape_OI[0]} x {shape_OI[1]}, but its rank is {rank}; lower lora.rank, or set "
            "lora.parts"
        )
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    # In float32: factors rounded to the base's bfloat16 would not add up to it again.
    weight_OI = a.new_empty(1, 1).expand(shape_OI) if matrix_OI is None else matrix_OI.float()
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    one = copy(config)
    one.init_lora_weights, one.use_dora = lora.init, False  # type: ignore[assignment]
    with a.device:
        layer: Any = Linear(linear, name, config=one, r=rank, lora_alpha=module.lora_alpha[name])
    if matrix_OI is not None:
        matrix_OI.copy_(linear.weight)
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _base_matrix(module: Any, slot: int) -> Tensor:
    """The base's matrix (O, I) under the factors in ``slot``, as a view."""
    if not isinstance(module, ParamWrapper):
        return module.get_base_layer().weight.detach()
    weight: Tensor = module.get_param().detach()
    if weight.ndim == 2:
        return weight
    matrix = weight[module.chosen[slot] if isinstance(module, SelectedExpertsLora) else slot]
    return matrix if module._did_swap_in_out_features else matrix.T
