"""DeepSpeed ZeRO-3: an MoE block is fetched as one unit.

ZeRO-3 gathers a submodule's parameters when its forward runs. Experts' weights are read by the
block's own forward, and ranks may choose different experts, so the block must be a leaf.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_finetune.moe.layers import moe_layers


def set_leaf_blocks(trainer: Any, model: nn.Module) -> list[type[nn.Module]]:
    """Make the model's MoE blocks leaves when ``trainer`` runs under ZeRO-3; return their classes.

    Not run by the tests on a real DeepSpeed, which needs an accelerator.
    """
    if not trainer.is_deepspeed_enabled:
        return []
    if trainer.accelerator.state.deepspeed_plugin.zero_stage != 3:
        return []
    from deepspeed.utils import set_z3_leaf_modules

    classes = list(dict.fromkeys(type(layer.block) for layer in moe_layers(model)))
    set_z3_leaf_modules(model, classes)
    return classes
