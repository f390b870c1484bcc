"""Detect other packages' kernels that replace transformers' code of a MoE layer.

The recorder reads a layer through transformers' experts function and the block's own forward. With
another in place of either the losses, or that kernel, would silently not run: it is refused.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_finetune.errors import ForeignKernelError

_WITHOUT_UNSLOTH = (
    "load the model with transformers and PEFT, in a process that does not import unsloth"
)
_REMEDIES = {
    "axolotl": "turn off use_scattermoe, use_sonicmoe and expert_parallel_size, and set "
    "experts_implementation: eager",
    "densemixer": "set dense_mixer: false, and method: densemixer here, the same gradient",
    "liger_kernel": "turn its SwiGLU off: liger_glu_activation: false in axolotl, "
    "enable_liger_kernel: false in LLaMA-Factory, liger_kernel_config={'swiglu': False} in "
    "transformers",
    "swift": "run without its NPU patch",
    "unsloth": _WITHOUT_UNSLOTH,
    "moe_utils": _WITHOUT_UNSLOTH,  # the name of Unsloth's compiled copy
}
"""How to turn a package's kernels off, by the start of the module's name."""

# Libraries that wrap a module's forward and call the original inside.
_WRAP = ("transformers", "torch", "peft", "accelerate", "deepspeed", "moe_finetune")


def check_kernels(block: nn.Module, experts: Any, index: int) -> None:
    """Refuse a block or experts whose forward another package replaced."""
    for code in _foreign_code(block, experts):
        remedy = next((text for name, text in _REMEDIES.items() if code.startswith(name)), None)
        raise ForeignKernelError(
            f"layer {index}: {code} runs the experts instead of transformers, so the method's "
            f"losses and LoRA would not reach them; {remedy or 'turn it off'}"
        )


def _foreign_code(block: nn.Module, experts: Any) -> Iterator[str]:
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    registered = ALL_EXPERTS_FUNCTIONS.get(name) if name in ALL_EXPERTS_FUNCTIONS else None
    if registered is not None and not _module(registered).startswith(_WRAP):
        yield f"{_module(registered)} (experts_implementation '{name}')"
    for module in (experts, block):
        forward = _forward(module)
        where = _module(forward)
        home = next(c.__module__ for c in type(module).__mro__ if "forward" in vars(c))
        if where.startswith(tuple(_REMEDIES)) or (
            where.split(".")[0] != home.split(".")[0] and not where.startswith(_WRAP)
        ):
            yield f"{where}.{getattr(forward, '__qualname__', type(forward).__name__)}"


def _forward(module: nn.Module) -> Any:
    """The function that runs ``module``: its class's, or one set on the instance."""
    forward: Callable = module.forward
    while isinstance(forward, functools.partial):
        forward = forward.func
    return getattr(forward, "__func__", forward)


def _module(function: Any) -> str:
    return getattr(function, "__module__", None) or ""
