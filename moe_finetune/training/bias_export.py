"""Where a learned routing bias is written: beside an adapter, or into a whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from moe_finetune.checkpoint.adapter import BIAS_FILE
from moe_finetune.checkpoint.adapter_metadata import read_metadata, write_metadata
from moe_finetune.checkpoint.bias import bias_config, bias_name
from moe_finetune.moe.bias import BiasBalancer
from moe_finetune.moe.layers import MoeLayer
from moe_finetune.training.state import save_state


def save_beside(balancer: BiasBalancer, layers: Sequence[MoeLayer], adapter: Path) -> None:
    """Write the bias into an adapter's folder; the merge puts it where the family keeps one.

    The metadata note it, so that an adapter that lost the file is refused.
    """
    save_state(adapter / BIAS_FILE, balancer.effective(layers))
    held = read_metadata(adapter)
    extra = {**held.extra, "router_bias": True}
    write_metadata(adapter, held.experts, held.experts_dropout, **extra)


def add_bias(
    balancer: BiasBalancer, layers: Sequence[MoeLayer], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A whole model's ``state`` with the bias where its family keeps one.

    Raises:
        UnsupportedModelError: the family has no place for it.
    """
    family = layers[0].family
    bias_config(family, layers[0].experts.config.to_dict())
    values = balancer.effective(layers)
    biases = {bias_name(family, at.index): values[f"bias.{at.index}"] for at in layers}
    return {**state, **biases}


def name_bias(layers: Sequence[MoeLayer], folder: Path) -> None:
    """Let the ``config.json`` of a checkpoint with :func:`add_bias` say that it has a bias."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    changes = bias_config(layers[0].family, config)
    if changes:
        file.write_text(json.dumps({**config, **changes}, indent=2) + "\n", encoding="utf-8")
