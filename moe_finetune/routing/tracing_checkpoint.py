"""Record the routing of a checkpoint, with an adapter and its loss-free bias if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from moe_finetune.moe.choice.loss_free_bias import BiasBalancer

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapters.updates import OpenAdapter
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.routing.measures_of_model import Measures


def record(
    base: Checkpoint,
    name: str,
    folder: Path,
    sequences: Mapping[str, Sequence[np.ndarray]],
    adapter: OpenAdapter | None = None,
    probabilities: bool = False,
    dtype: str = "auto",
    norms: bool = False,
) -> Measures:
    """Record ``base``, opened with its values, and ``adapter``; see :func:`trace_model`."""
    import torch

    from moe_finetune.checkpoint.adapters.in_peft import with_adapter
    from moe_finetune.checkpoint.load_model import load_model
    from moe_finetune.routing.tracing import trace_model

    device = "cuda" if torch.cuda.is_available() else None
    model: nn.Module = load_model(base, dtype=dtype, device_map=device)
    balancer = None
    if adapter is not None:
        model = with_adapter(model, adapter)
        balancer = stored_bias(model, adapter.folder)
    return trace_model(
        model,
        sequences,
        folder,
        checkpoint=f"{name} + {adapter.folder}" if adapter is not None else name,
        probabilities=probabilities,
        norms=norms,
        perturbation=balancer,
    )


def stored_bias(model: nn.Module, adapter: Path) -> BiasBalancer | None:
    """The loss-free bias that an adapter was trained with, for use on ``model``, or None."""
    import torch

    from moe_finetune.checkpoint.adapters.files import read_bias
    from moe_finetune.moe.choice.select_again import Rule
    from moe_finetune.moe.layers import model_facts, moe_layers

    stored = read_bias(adapter)
    if stored is None:
        return None
    facts = model_facts(model)
    balancer = BiasBalancer(facts.selecting_layers, facts.num_experts, update=0.0)
    for layer in moe_layers(model):
        if layer.index not in balancer.bias:
            continue
        effective = torch.tensor(stored[layer.index])
        own_bias = Rule(layer).own_bias(effective)
        balancer.bias[layer.index] = effective - own_bias.cpu()  # the layer adds its own again
    return balancer
