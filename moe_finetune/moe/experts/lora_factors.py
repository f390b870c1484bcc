"""Per-expert LoRA factors as PEFT stores them, read without building ``W + s B A``.

PEFT packs the factors of all experts into two matrices: in ``lora_A`` (r*E, I) the expert is the
slowest index, in ``lora_B`` (O, r*E) the fastest.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear, pad

from moe_finetune.errors import CaptureError
from moe_finetune.moe.experts.forward import LoraFactors
from moe_finetune.moe.experts.lora_on_chosen import SelectedExpertsLora
from moe_finetune.moe.experts.lora_shared import SharedOuterLora

RANK_MULTIPLE = 8


@contextmanager
def quiet_patterns() -> Iterator[None]:
    """Silence PEFT 0.21's wrong warning that a parameter's rank or alpha is ignored."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        yield


def parameter_wrappers(module: nn.Module) -> tuple[nn.Module, dict[str, ParamWrapper]]:
    """Unwrap PEFT's nested parameter wrappers: the module inside, and each wrapper by parameter."""
    wrappers: dict[str, ParamWrapper] = {}
    while isinstance(module, ParamWrapper):
        wrappers[module.parameter_name] = module
        module = module.base_layer
    return module, wrappers


def variants(module: Any) -> list[Any]:
    """The modules that may run as ``module``: itself, or PEFT's ``modules_to_save`` copies.

    The first is the one that runs now.
    """
    if not isinstance(module, ModulesToSaveWrapper):
        return [module]
    original, saved = module.original_module, dict(module.modules_to_save)
    active = [] if module.disable_adapters else [n for n in module.active_adapters if n in saved]
    modules = [saved.pop(name) for name in active[:1]]
    return [*modules, original, *saved.values()]


def active_adapter(wrapper: ParamWrapper) -> str | None:
    """Name of the active adapter, or None if disabled or merged."""
    if wrapper.disable_adapters or wrapper.merged:
        return None
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if len(names) > 1:
        raise CaptureError(
            f"adapters {names} are both active on '{wrapper.parameter_name}'; activate one with "
            "model.set_adapter(name), or merge them first"
        )
    return names[0] if names else None


def expert_factors(
    wrapper: ParamWrapper | None, dtype: torch.dtype, dropout: float = 0.0, grouped: bool = False
) -> LoraFactors | None:
    """Factors of the wrapper's active adapter in ``dtype``, with their graph, or None.

    For grouped products the rank is padded with zeros to a multiple of ``RANK_MULTIPLE``, because
    rows must be aligned.
    """
    name = active_adapter(wrapper) if wrapper is not None else None
    if wrapper is None or name is None:
        return None
    if isinstance(wrapper, SharedOuterLora):
        a, b = wrapper.by_expert(name)
        return _prepared(a, b, wrapper, name, dtype, dropout, grouped)
    experts = wrapper.num_experts
    packed_a: Tensor = wrapper.lora_A[name].weight  # type: ignore[assignment]
    packed_b: Tensor = wrapper.lora_B[name].weight  # type: ignore[assignment]
    a_ErI = packed_a.view(experts, -1, packed_a.shape[1])
    # A transpose of two dimensions: copying one of three takes three times as long on a CPU.
    b_EOr = packed_b.reshape(-1, experts).t().to(dtype).contiguous()
    b_EOr = b_EOr.view(experts, packed_b.shape[0], -1)
    if isinstance(wrapper, SelectedExpertsLora):
        a_ErI, b_EOr = wrapper.spread(a_ErI), wrapper.spread(b_EOr)
    if _takes_rows_for_inputs(wrapper):
        a_ErI, b_EOr = b_EOr.transpose(1, 2), a_ErI.transpose(1, 2)
    return _prepared(a_ErI, b_EOr, wrapper, name, dtype, dropout, grouped)


def _prepared(
    a_ErI: Tensor,
    b_EOr: Tensor,
    wrapper: ParamWrapper,
    name: str,
    dtype: torch.dtype,
    dropout: float,
    grouped: bool,
) -> LoraFactors:
    missing = -a_ErI.shape[-2] % RANK_MULTIPLE if grouped else 0
    if missing:
        a_ErI, b_EOr = pad(a_ErI, (0, 0, 0, missing)), pad(b_EOr, (0, missing))
    return LoraFactors(
        a_ErI.to(dtype).contiguous(),
        b_EOr.to(dtype).contiguous(),
        wrapper.scaling[name],
        dropout if wrapper.training else 0.0,
    )


def _takes_rows_for_inputs(wrapper: ParamWrapper) -> bool:
    """Whether A reads the output dimension, as PEFT before 0.19 stores (experts, out, in).

    The product is then the transpose of the update, so A and B are exchanged.
    """
    if hasattr(wrapper, "_did_swap_in_out_features") or wrapper.get_param().ndim != 3:
        return False
    return not getattr(wrapper.get_base_layer(), "is_transposed", False)


def router_linear(router: Any, path: str = "weight") -> Any:
    """The module with the router's weight at ``path``, inside PEFT's wrappers."""
    if not isinstance(router, ParamWrapper):
        router = variants(router)[0]
    for name in path.split(".")[:-1]:
        router = getattr(router, name)
    return router


def stored_router_weight(router: Any, path: str = "weight") -> Tensor:
    """The router's stored weight (E, H), without a LoRA adapter."""
    linear = router_linear(router, path)
    holder: Any = linear.get_base_layer() if isinstance(linear, ParamWrapper) else linear
    return holder.weight


def router_weight(router: Any, path: str = "weight") -> Tensor:
    """The router's effective weight (E, H), adapter included, with its graph."""
    linear, weight = router_linear(router, path), stored_router_weight(router, path)
    name = active_adapter(linear) if isinstance(linear, ParamWrapper) else None
    return weight if name is None else weight + linear.get_delta_weight(name)


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
    """Output (..., out) of the wrapped layer, ``x W^T + s (drop(x) A^T) B^T``, for ``x`` (..., in).

    PEFT's parameter wrapper adds ``s B A`` into the weight on every forward and has no dropout.
    """
    base = wrapper.base_layer(x)
    name = active_adapter(wrapper)
    if name is None:
        return base
    a: Tensor = wrapper.lora_A[name].weight  # type: ignore[assignment]
    b: Tensor = wrapper.lora_B[name].weight  # type: ignore[assignment]
    low = linear(drop(x, dropout, wrapper.training).to(a.dtype), a)
    return base + (linear(low, b) * wrapper.scaling[name]).to(base.dtype)
