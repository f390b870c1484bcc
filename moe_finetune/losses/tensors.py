"""Helpers of all losses: shape checks, dtypes, masked means."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from moe_finetune.torch_extension import is_fake

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def check_shapes(**tensors: Tensor | None) -> None:
    """Check each tensor against the suffix of its name; equal letters are equal sizes."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
        letters = name.rsplit("_", 1)[1]
        got = tuple(tensor.shape)
        sizes_after = dict(sizes)
        fits = len(got) == len(letters)
        for letter, size in zip(letters, got, strict=False):
            fits = fits and sizes_after.setdefault(letter, size) == size
        if not fits:
            expected = ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters)
            raise ValueError(f"{name} has shape {got}, expected ({expected})")
        if name.startswith(("index_", "token_ids_")) and tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected an integer type")
        sizes = sizes_after


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if ``value`` is not in ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is '{value}', expected one of {', '.join(choices)}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert to float32 unless float64. Gradients arrive in the tensor's own dtype."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def full_precision(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Run ``function`` outside autocast, which would compute its products in 16 bits."""

    @functools.wraps(function)
    def wrapped(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with without_autocast(next((tensor.device for tensor in tensors), torch.device("cpu"))):
            return function(*args, **kwargs)

    return wrapped


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Disable autocast on ``device`` if it is enabled."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def on_host(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read without waiting: on a CPU, and not fake."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def distributed_run() -> bool:
    """Whether a process group is initialized."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """Number of processes of this run."""
    return distributed.get_world_size() if distributed_run() else 1


def packed_index(index: Tensor, experts: int) -> Tensor:
    """Numbers of experts in as few bytes as hold them."""
    return index.to(torch.uint8 if experts <= 256 else torch.int16)


def blank(tensor: Tensor, mask_T: Tensor | None) -> Tensor:
    """Set rows that do not count to zero, so a NaN there has no effect."""
    if mask_T is None:
        return tensor
    rows = mask_T.to(torch.bool).view(-1, *(1,) * (tensor.dim() - 1))
    return torch.where(rows, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def counted(tensor: Tensor, mask_T: Tensor | None) -> Tensor:
    """The tensor in at least float32, with rows that do not count set to zero."""
    return blank(at_least_float32(tensor), mask_T)


def count(mask_T: Tensor | None, values_T: Tensor) -> Tensor:
    """Number of tokens that count, at least 1, in the dtype of ``values_T``."""
    if mask_T is None:
        return values_T.new_full((), max(values_T.shape[0], 1))
    return mask_T.to(torch.bool).sum().clamp_min(1).to(values_T.dtype)


def mean_over_tokens(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """Mean over the tokens that count; 0 when none does."""
    return blank(values_T, mask_T).sum() / count(mask_T, values_T)
