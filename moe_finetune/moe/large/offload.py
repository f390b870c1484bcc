"""Keep frozen expert stacks in the host's memory, and fetch them layer by layer.

A stack's parameter is replaced by an :class:`OffloadedStack`, which fetches the values on demand.
An operation that reads it gets the layer's copy on the device. While a layer computes, the next one
is copied: the layer above in the forward, the one below in the backward. Autograd saves the stack
without its values, so the backward fetches them again, with or without checkpointing. At most two
layers are on the device at a time. Quantized stacks are copied as packed bytes and scales.

A :class:`Transfers` copies the bytes; on a GPU, with pinned memory and a separate stream.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from moe_finetune.errors import RecipeError
from moe_finetune.losses.tensors import distributed_run
from moe_finetune.moe.experts.offloaded_stack import OffloadedStack
from moe_finetune.moe.layers import moe_layers
from moe_finetune.quantization.weight import QuantizedWeight

Stacks = dict[str, Tensor]


class Transfers(Protocol):
    """How stacks are stored on the host and copied to the device."""

    device: torch.device

    def keep(self, stack: Tensor) -> Tensor:
        """Return the copy on the host."""

    def begin(self, stacks: Stacks) -> Callable[[], Stacks]:
        """Start copying to the device; the returned function waits for the copy and returns it."""


class CudaTransfers:
    """Transfers with pinned memory and a separate CUDA stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def keep(self, stack: Tensor) -> Tensor:
        return _on_parts(stack, lambda part: part.cpu().pin_memory())

    def begin(self, stacks: Stacks) -> Callable[[], Stacks]:
        with torch.cuda.stream(self.stream):
            copies = {n: s.to(self.device, non_blocking=True) for n, s in stacks.items()}
            done = torch.cuda.Event()
            done.record(self.stream)

        def arrived() -> Stacks:
            torch.cuda.current_stream(self.device).wait_event(done)
            for copy in copies.values():
                _on_parts(copy, recorded)
            return copies

        def recorded(part: Tensor) -> Tensor:
            # Its memory may be reused only after the compute stream has finished with it.
            part.record_stream(torch.cuda.current_stream(self.device))
            return part

        return arrived


class ExpertOffload:
    """Fetches layers in the order in which training reads them.

    ``host`` has the stacks of each MoE layer, ``fetched`` the positions of layers in the order in
    which copies started.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.host: list[Stacks] = []
        self.fetched: list[int] = []
        self._here: dict[int, Callable[[], Stacks]] = {}
        self._upwards = True
        self._last: int | None = None
        self._lock = threading.Lock()  # a GPU's backward runs in another thread

    @property
    def resident(self) -> list[int]:
        """Positions of the layers that are on the device or being copied."""
        return sorted(self._here)

    def stack(self, position: int, name: str) -> Tensor:
        """Return one stack of a layer on the device, and start copying the next layer."""
        with self._lock:
            self._turn(position)
            following = position + (1 if self._upwards else -1)
            positions = [position]
            if 0 <= following < len(self.host):
                positions.append(following)
            for gone in self._here.keys() - set(positions):
                del self._here[gone]
            for one in positions:
                if one not in self._here:
                    self.fetched.append(one)
                    self._here[one] = self.transfers.begin(self.host[one])
            return self._here[position]()[name]

    def _turn(self, position: int) -> None:
        """Update the direction: a backward goes down, and a forward starts at the bottom."""
        if self._last is not None and position != self._last:
            self._upwards = position > self._last
        if position == len(self.host) - 1:
            self._upwards = False
        elif position == 0:
            self._upwards = True
        self._last = position


def offload_experts(model: nn.Module, transfers: Transfers | None = None) -> ExpertOffload:
    """Move all frozen expert stacks of ``model`` to the host, in place.

    All other tensors stay where they are; ``model.to(device)`` moves them but not the stacks.
    ``transfers`` copies the bytes, by default to the current GPU.
    """
    if transfers is None:
        check_offload()
        transfers = CudaTransfers(torch.device("cuda", torch.cuda.current_device()))
    offload = ExpertOffload(transfers)
    layers = moe_layers(model)
    for layer in layers:
        stacks: Stacks = {}
        for name in layer.places.expert_parameters:
            stack = getattr(layer.experts, name)
            if stack.requires_grad:
                raise RecipeError(
                    "model.offload: experts that train in full cannot be offloaded; give a `lora:` "
                    "section, or set model.offload: none"
                )
            stacks[name] = transfers.keep(stack.detach())
        offload.host.append(stacks)
    for position, layer in enumerate(layers):
        for name, host in offload.host[position].items():
            fetch = partial(offload.stack, position, name)
            stack = OffloadedStack(fetch, host, transfers.device)
            layer.experts._parameters[name] = nn.Parameter(stack, requires_grad=False)
    return offload


def _on_parts(stack: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to a stack, or to the bytes and scales of a quantized one."""
    return stack.on_parts(change) if isinstance(stack, QuantizedWeight) else change(stack)


def check_offload() -> None:
    """Refuse offload where it cannot help."""
    if not torch.cuda.is_available():
        raise RecipeError(
            "model.offload: 'experts' moves stacks between a GPU and its host, but there is no "
            "GPU; set model.offload: none"
        )
    if distributed_run():
        raise RecipeError(
            "model.offload: 'experts' is for one process with one GPU; shard the model over "
            "several (recipes/hardware), with model.offload: none"
        )
