"""Select and quantize a model's large frozen weights.

Quantized are routed experts and the linear layers of attention, shared experts and dense layers.
Routers, gates with a single output, norms, biases, embeddings and the language-model head keep the
model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from moe_finetune.models import family_of
from moe_finetune.models.module_places import Places
from moe_finetune.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def quantized_names(model: nn.Module, places: Places) -> frozenset[str]:
    """Names of the parameters to quantize; see the module docstring."""
    router = f".{places.router_path}."
    stacks = tuple(f".{target}" for target in places.expert_targets)
    names = {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.endswith(stacks)
    }
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear) and module.out_features > 1
        is_kept = router in f".{name}." or "norm" in name  # norms that a small network computes
        if linear and name.startswith(f"{places.backbone}.layers.") and not is_kept:
            names.add(f"{name}.weight")
    return frozenset(names)


def quantize_model(model: PreTrainedModel) -> None:
    """Quantize and freeze the large weights of a model in memory, in place."""
    for name in quantized_names(model, family_of(model.config).places(model.config)):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        weight = QuantizedWeight.of(module.get_parameter(leaf))
        module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
