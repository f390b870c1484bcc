"""Frozen expert stacks in the host's memory, on the device for one layer at a time.

A stack's parameter is replaced by an :class:`OffloadedStack`: a tensor of its shape, dtype and
device that holds a way to the values and not the values. An operation that reads it gets the
layer's copy on the device, fetched when it is first asked for; while a layer computes, the next
one's copy is under way: the layer above in the forward, the one below in the backward. Autograd
saves the stack without its values, so the backward fetches them again, with checkpointing and
without. Two layers are on the device at any time.

How bytes move is a :class:`Transfers`: pinned memory and a stream of its own on a GPU; plain copies
on a CPU, where the tests run the same logic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.losses.tensors import distributed_run
from moe_finetune.moe.layers import moe_layers

aten: Any = torch.ops.aten
_VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
}
Stacks = dict[str, Tensor]
View = tuple[Any, tuple, dict]


class Transfers(Protocol):
    """How stacks wait on the host and come to the device."""

    device: torch.device

    def keep(self, stack: Tensor) -> Tensor:
        """The copy that waits on the host."""

    def begin(self, stacks: Stacks) -> Callable[[], Stacks]:
        """Start copying to the device; the result waits for it, as whoever calls it computes."""


class CudaTransfers:
    """Pinned memory, and a stream beside the one that computes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def keep(self, stack: Tensor) -> Tensor:
        return stack.cpu().pin_memory()

    def begin(self, stacks: Stacks) -> Callable[[], Stacks]:
        with torch.cuda.stream(self.stream):
            copies = {n: s.to(self.device, non_blocking=True) for n, s in stacks.items()}
            done = torch.cuda.Event()
            done.record(self.stream)

        def arrived() -> Stacks:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(done)
            for copy in copies.values():
                copy.record_stream(here)  # its memory is free only when this stream is through
            return copies

        return arrived


class HostTransfers:
    """Copies within the host's memory, for tests of the logic."""

    device = torch.device("cpu")

    def keep(self, stack: Tensor) -> Tensor:
        return stack

    def begin(self, stacks: Stacks) -> Callable[[], Stacks]:
        """Copies made at once."""
        copies = {name: stack.clone() for name, stack in stacks.items()}
        return lambda: copies


class ExpertOffload:
    """Fetches layers in the order in which training asks for them.

    Args:
        transfers: how bytes move.

    Attributes:
        host: stacks of each MoE layer, from the first to the last.
        fetched: positions in the order in which copies were begun.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.host: list[Stacks] = []
        self.fetched: list[int] = []
        self._here: dict[int, Callable[[], Stacks]] = {}
        self._upwards = True
        self._last: int | None = None
        self._lock = threading.Lock()  # a GPU's backward has a thread of its own

    @property
    def resident(self) -> list[int]:
        """Positions of the layers that are on the device, or on their way."""
        return sorted(self._here)

    def stack(self, position: int, name: str) -> Tensor:
        """One stack of a layer on the device; begins the copy of the layer that comes next."""
        with self._lock:
            self._turn(position)
            following = position + (1 if self._upwards else -1)
            wanted = [position]
            if 0 <= following < len(self.host):
                wanted.append(following)
            for gone in self._here.keys() - set(wanted):
                del self._here[gone]
            for one in wanted:
                if one not in self._here:
                    self.fetched.append(one)
                    self._here[one] = self.transfers.begin(self.host[one])
            return self._here[position]()[name]

    def _turn(self, position: int) -> None:
        """Follow the direction: a backward goes down, and a forward begins at the bottom."""
        if self._last is not None and position != self._last:
            self._upwards = position > self._last
        if position == len(self.host) - 1:
            self._upwards = False
        elif position == 0:
            self._upwards = True
        self._last = position


class OffloadedStack(Tensor):
    """A stack's shape, dtype and device, with views on it, and where its values are fetched."""

    _offload: ExpertOffload
    _place: tuple[int, str]
    _views: tuple[View, ...]

    @staticmethod
    def __new__(
        cls, offload: ExpertOffload, place: tuple[int, str], views: tuple[View, ...] = ()
    ) -> OffloadedStack:
        host = offload.host[place[0]][place[1]]
        shape = _seen(torch.empty_like(host, device="meta"), views)
        self: Any = Tensor._make_wrapper_subclass(
            cls,
            shape.shape,
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=host.dtype,
            device=offload.transfers.device,
        )
        self._offload, self._place, self._views = offload, place, views
        return self

    def values(self) -> Tensor:  # type: ignore[override]
        """The ordinary tensor, on the device."""
        return _seen(self._offload.stack(*self._place), self._views)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedStack(shape={tuple(self.shape)}, place={self._place})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            first = args[0]
            view = (func, args[1:], kwargs)
            return OffloadedStack(first._offload, first._place, (*first._views, view))
        if func._schema.is_mutable and isinstance(args[0], OffloadedStack):
            raise CaptureError(
                f"{func}: an offloaded expert stack is frozen, and writing into it would be lost. "
                "PEFT's own forward and merge do that: run the model under Specialization or "
                "Recorder, and merge with `moe-finetune merge`; or set model.offload: none"
            )
        args, kwargs = tree_map(
            lambda x: x.values() if isinstance(x, OffloadedStack) else x, (args, kwargs)
        )
        return func(*args, **kwargs)


def _seen(tensor: Tensor, views: tuple[View, ...]) -> Tensor:
    for func, args, kwargs in views:
        tensor = func(tensor, *args, **kwargs)
    return tensor


def offload_experts(model: nn.Module, transfers: Transfers | None = None) -> ExpertOffload:
    """Move all frozen expert stacks of ``model`` to the host, in place.

    Factors of LoRA, routers and everything else stay. The model's other tensors may be anywhere;
    ``model.to(device)`` moves them and leaves the stacks.

    Args:
        model: with LoRA or without, its weights in memory.
        transfers: how bytes move; by default to the current GPU.

    Raises:
        RecipeError: there is no GPU, or a stack trains.
    """
    if transfers is None:
        check_offload()
        transfers = CudaTransfers(torch.device("cuda", torch.cuda.current_device()))
    offload = ExpertOffload(transfers)
    layers = moe_layers(model)
    for layer in layers:
        found: Stacks = {}
        for name in layer.family.expert_parameters:
            stack = getattr(layer.experts, name)
            if stack.requires_grad:
                raise RecipeError(
                    "model.offload: experts that train in full cannot be offloaded; give a `lora:` "
                    "section, or set model.offload: none"
                )
            found[name] = transfers.keep(stack.detach())
        offload.host.append(found)
    for position, layer in enumerate(layers):
        for name in offload.host[position]:
            stack = OffloadedStack(offload, (position, name))
            layer.experts._parameters[name] = nn.Parameter(stack, requires_grad=False)
    return offload


def check_offload() -> None:
    """Refuse offload where it cannot help.

    Raises:
        RecipeError: no GPU, or several processes, whose wrappers copy all parameters.
    """
    if not torch.cuda.is_available():
        raise RecipeError(
            "model.offload: 'experts' moves stacks between a GPU and its host, and there is no GPU "
            "here; set model.offload: none"
        )
    if distributed_run():
        raise RecipeError(
            "model.offload: 'experts' is for one process with one GPU; shard the model over "
            "several (recipes/hardware), with model.offload: none"
        )
