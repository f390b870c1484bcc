"""The one way to run forwards that only an observer reads, which leaves the model as it was."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

from moe_finetune.moe.layers import in_mode
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.hooks import Observer, Recorder


@contextmanager
def observed(
    model: nn.Module,
    observer: Observer,
    needs: frozenset[str] = frozenset(),
    *,
    perturbation: Perturbation | None = None,
    recorder: Recorder | None = None,
) -> Iterator[None]:
    """Forwards in eval mode (no dropout, no noise), without gradients, with the active adapters.

    ``observer`` gets every layer's record with the tokens of the attention mask. The mode of every
    module, the generators, and the recorder's plan are restored, after an error too, so a training
    goes on as if nothing had run.

    Args:
        perturbation: a change to routing that belongs to the model, such as a loss-free bias.
        recorder: the model's recorder, if it is installed already, with its own perturbation.
    """
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        recorder = recorder or stack.enter_context(Recorder(model, perturbation=perturbation))
        stack.enter_context(
            recorder.using(observers=(observer,), needs=needs, observe="all",
                           token_mask="attention")
        )  # fmt: skip
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The same forwards of a model, or of its stock class, whose routing nobody reads."""
    with generators_kept(), in_mode(model, train=False), torch.no_grad():
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's generators; what a loader draws to start counts."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
