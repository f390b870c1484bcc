"""The states an optimizer keeps for trained parameters, by its name in ``trainer.optim``."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_finetune.errors import RecipeError, did_you_mean

DEFAULT_OPTIMIZER = "adamw_torch_fused"
SMALL = 4096
"""Number of elements below which bitsandbytes keeps a tensor's state in 32 bits."""

BLOCK = 256
"""Number of elements that share a float32 scale in bitsandbytes' 8-bit states."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    Attributes:
        moments: number of state tensors of a parameter's shape.
        bits: size of their elements; 8 includes bitsandbytes' scales.
        copies: number of temporary tensors of the parameters' shapes during the step.
        factored: whether second moments are stored as rows and columns (Adafactor).
        paged: whether states are in memory shared with the host, counted as host memory.
    """

    moments: int
    bits: int = 32
    copies: int = 0
    factored: bool = False
    paged: bool = False


_ADAM = Optimizer(2)
_ADAM_8 = Optimizer(2, bits=8)
_LION_8 = Optimizer(1, bits=8)
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": _ADAM,
    "adamw_torch": Optimizer(2, copies=2),
    "adamw_8bit": _ADAM_8,
    "adamw_bnb_8bit": _ADAM_8,
    "paged_adamw_32bit": Optimizer(2, paged=True),
    "paged_adamw": Optimizer(2, paged=True),
    "paged_adamw_8bit": Optimizer(2, bits=8, paged=True),
    "lion_32bit": Optimizer(1),
    "lion_8bit": _LION_8,
    "paged_lion_32bit": Optimizer(1, paged=True),
    "paged_lion_8bit": Optimizer(1, bits=8, paged=True),
    "rmsprop": Optimizer(1, copies=1),
    "rmsprop_bnb": Optimizer(1),
    "rmsprop_bnb_8bit": Optimizer(1, bits=8),
    "adagrad": Optimizer(1, copies=1),
    "adafactor": Optimizer(0, factored=True, copies=2),
    "sgd": Optimizer(0),
}
"""Values of Adam from torch and bitsandbytes 0.50; ``copies`` from torch's foreach versions."""


def optimizer_of(name: str) -> Optimizer:
    """The optimizer that ``trainer.optim`` names.

    Raises:
        RecipeError: the states of this optimizer are not known.
    """
    if name not in OPTIMIZERS:
        raise RecipeError(
            f"trainer.optim: the states of '{name}' are unknown, so its memory cannot be "
            f"planned{did_you_mean(name, OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def state_bytes(optimizer: Optimizer, shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of optimizer states for float32 parameters of these shapes."""
    total = 0
    for shape in shapes:
        size = math.prod(shape)
        if optimizer.factored:
            rows = size // shape[-1] if shape else 1
            total += 4 * (rows + size // rows if len(shape) > 1 else size)
        elif optimizer.bits == 8 and size >= SMALL:
            total += optimizer.moments * (size + 4 * -(-size // BLOCK))
        else:
            total += optimizer.moments * 4 * size
    return total


def step_bytes(optimizer: Optimizer, shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of temporary memory during an optimizer step."""
    return optimizer.copies * sum(4 * math.prod(shape) for shape in shapes)
