"""What all losses share: shape checks, arithmetic type, masked means.

Shape legend: T tokens, E routed experts, K selected, H hidden, D expert width, V vocabulary,
X any width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import is_fake

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def check_shapes(**tensors: Tensor | None) -> None:
    """Check each tensor against the suffix of its name; equal letters are equal sizes.

    Raises:
        ValueError: naming the argument, the shape got and the shape expected.
    """
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
    """Raise ValueError when ``value`` is none of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is '{value}', expected one of {', '.join(choices)}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Float64 stays; narrower types become float32. Gradients arrive in the tensor's own type."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def full_precision(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Run ``function`` outside autocast, which would put its products back into 16 bits."""

    @functools.wraps(function)
    def wrapped(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with without_autocast(next((tensor.device for tensor in tensors), torch.device("cpu"))):
            return function(*args, **kwargs)

    return wrapped


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off on ``device``, where there is one and it is on."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def on_host(tensor: Tensor) -> bool:
    """Whether reading the tensor's values waits for nothing: on a CPU, and not a fake tensor."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def distributed_run() -> bool:
    """Whether a process group is up."""
    return distributed.is_available() and distributed.is_initialized()


def blank(tensor: Tensor, mask_T: Tensor | None) -> Tensor:
    """Zeros instead of the rows that do not count, so that a NaN there reaches nothing."""
    if mask_T is None:
        return tensor
    rows = mask_T.to(torch.bool).view(-1, *(1,) * (tensor.dim() - 1))
    return torch.where(rows, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def counted(tensor: Tensor, mask_T: Tensor | None) -> Tensor:
    """The tensor in at least float32, with zeros in the rows that do not count."""
    return blank(at_least_float32(tensor), mask_T)


def count(mask_T: Tensor | None, values_T: Tensor) -> Tensor:
    """Number of tokens that count, at least 1, in the type of ``values_T``."""
    if mask_T is None:
        return values_T.new_full((), max(values_T.shape[0], 1))
    return mask_T.to(torch.bool).sum().clamp_min(1).to(values_T.dtype)


def mean_over_tokens(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """Mean over the tokens that count; 0 when none does."""
    return blank(values_T, mask_T).sum() / count(mask_T, values_T)
