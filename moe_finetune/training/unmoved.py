"""Trainable tensors that training never changes, in anybody's trainer: are the experts trained?"""

import logging

import torch
from torch import Tensor, nn

STEPS = 10
"""Optimizer steps after which tensors are compared with their start."""
log = logging.getLogger(__name__)


def fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """A few numbers for each trainable tensor, which change when it changes."""
    return {name: _of(p) for name, p in model.named_parameters() if p.requires_grad}


def unmoved_since(start: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of tensors that are as in ``start``; warns about them."""
    now = {name: p for name, p in model.named_parameters() if name in start}
    names = [name for name, p in now.items() if torch.equal(_of(p), start[name])]
    if names:
        counts = f"{len(names)} of {len(start)}"
        few = ", ".join(names[:3])
        log.warning("%s trainable tensors never changed in %d steps, e.g. %s", counts, STEPS, few)
    return names


def _of(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    wide = values.double().reshape(-1)
    ramp = torch.arange(1, wide.numel() + 1, device=wide.device, dtype=torch.float64)
    return torch.stack([wide.sum(), wide.square().sum(), (wide * ramp).sum()]).cpu()
