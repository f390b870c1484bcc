"""LoRA on an ordinary matrix that PEFT wraps as a parameter: beside the matrix, with dropout.

PEFT's parameter wrapper adds ``s B A`` into the weight on every forward and has no dropout. For a
linear layer the same result is ``x W^T + s (drop(x) A^T) B^T``.
"""

from __future__ import annotations

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear

from moe_finetune.moe.lora_factors import active_adapter


def wrapped_linears(model: nn.Module) -> list[ParamWrapper]:
    """PEFT parameter wrappers around the weight of a linear layer."""
    return [
        module
        for module in model.modules()
        if isinstance(module, ParamWrapper)
        and type(module.base_layer) is nn.Linear
        and module.parameter_name == "weight"
    ]


def run_linear(wrapper: ParamWrapper, dropout: float, x: Tensor) -> Tensor:
    """Output of the wrapped layer, its adapter beside it; ``x`` (..., in) -> (..., out)."""
    base = wrapper.base_layer(x)
    name = active_adapter(wrapper)
    if name is None:
        return base
    a: Tensor = wrapper.lora_A[name].weight  # type: ignore[assignment]
    b: Tensor = wrapper.lora_B[name].weight  # type: ignore[assignment]
    low = linear(drop(x, dropout, wrapper.training).to(a.dtype), a)
    return base + (linear(low, b) * wrapper.scaling[name]).to(base.dtype)
