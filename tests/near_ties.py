"""Routers whose choice flips in a recomputation: nearly equal rows, and a disturbance of 1e-6."""

import torch
from torch import nn

from moe_finetune.moe.kept_choice import in_backward
from moe_finetune.moe.layers import moe_layers


@torch.no_grad()
def near_tied(model: nn.Module) -> None:
    """Make each second row of the routers nearly equal to the one before it."""
    generator = torch.Generator().manual_seed(6)
    for layer in moe_layers(model):
        weight = layer.router.get_parameter(layer.family.router_weight)
        noise = torch.randn(weight[1::2].shape, generator=generator)
        weight[1::2] = weight[::2] + 1e-7 * noise
        for name, bias in layer.block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[1::2] = bias[::2]


def disturb_recomputations(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)

    def disturbed(module, args):
        noise = torch.randn(args[0].shape, generator=generator)
        return (args[0] + (1e-6 if in_backward() else 0.0) * noise, *args[1:])

    for layer in moe_layers(model):
        layer.router.register_forward_pre_hook(disturbed)
