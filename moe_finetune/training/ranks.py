"""Communication between the processes of a run. With one process everything here is a no-op."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import distributed

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.losses.tensors import distributed_run, world_size

Result = TypeVar("Result")


def join_group() -> None:
    """Start the process group (accelerate's state) when a launcher started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed_run():
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def rank() -> int:
    """This process's rank; only rank 0 writes files."""
    return distributed.get_rank() if distributed_run() else 0


def barrier() -> None:
    """Wait until every process reaches this call."""
    if distributed_run():
        distributed.barrier()


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank; every rank must call this."""
    if world_size() == 1:
        return flag
    vote = torch.tensor(int(flag), dtype=torch.int32, device=device())
    distributed.all_reduce(vote, op=distributed.ReduceOp.MAX)
    return bool(vote.item())


def together(action: Callable[[], Result]) -> Result:
    """Return ``action()`` of this rank; if it fails on one rank, it fails on all."""
    try:
        result, problem = action(), None
    except MoeFinetuneError as error:
        result, problem = None, error
    if any_rank(problem is not None):
        raise problem or MoeFinetuneError("another process of this run failed; see its message")
    return result  # type: ignore[return-value]


@contextmanager
def first_alone(hold: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let rank 0 enter ``hold()``, such as a lock, for the group; if it cannot, every rank
    stops.
    """
    with ExitStack() as stack:
        together(lambda: stack.enter_context(hold()) if rank() == 0 else None)
        yield


@contextmanager
def others_needed() -> Iterator[None]:
    """Report that another process of the run has ended, instead of the library's error."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo/" not in str(error):
            raise
        raise ConnectionError(
            "another process of this run has ended or does not answer, so this one stops, too; "
            "see its message; --resume continues from the last checkpoint"
        ) from error


def gather_bytes(blob: bytes) -> list[bytes]:
    """Gather ``blob`` of every rank, in order, without pickle; every rank must call this."""
    if world_size() == 1:
        return [blob]
    target = device()
    size = torch.tensor([len(blob)], device=target)
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    distributed.all_gather(sizes, size)
    longest = int(max(sizes))
    mine = torch.zeros(longest, dtype=torch.uint8, device=target)
    if blob:
        mine[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(target)
    gathered = [torch.zeros_like(mine) for _ in range(world_size())]
    distributed.all_gather(gathered, mine)
    return [
        bytes(part[: int(length)].cpu().numpy())
        for part, length in zip(gathered, sizes, strict=True)
    ]


def equal_on_ranks(count: int) -> bool:
    """Whether ``count`` is the same on all ranks; every rank must call this."""
    return len(set(gather_bytes(str(count).encode()))) == 1


def device() -> torch.device:
    """The device of the group's collectives."""
    if "nccl" in distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
