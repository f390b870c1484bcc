"""Whether a checkpoint's tensors are those that its ``config.json`` describes; headers only."""

from __future__ import annotations

import re
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.families import family_of
from moe_finetune.weights.checkpoint import Checkpoint

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_fit(checkpoint: Checkpoint, config: Any) -> None:
    """Compare layers, experts, hidden size and vocabulary with ``config``.

    transformers drops tensors of layers that the config does not count, without an error.

    Raises:
        CheckpointError: names config.json, the key, and what the tensors say.
    """
    place = checkpoint.folder / "config.json"
    family = family_of(config)
    numbers = [int(m.group(1)) for name in checkpoint.tensors if (m := _LAYER.search(name))]
    layers = max(numbers, default=-1) + 1
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    if not config.num_hidden_layers <= layers <= config.num_hidden_layers + extra:
        raise CheckpointError(
            f"{place}: num_hidden_layers is {config.num_hidden_layers}, and the tensors are of "
            f"{layers} layers; restore the checkpoint's own config.json"
        )
    experts = family.num_experts(config)
    for layer in family.moe_layers(config):
        stored = checkpoint.experts.get(layer)
        if stored != experts:
            raise CheckpointError(
                f"{place}: layer {layer} should have {experts} routed experts, and its tensors are "
                f"of {stored or 'none'}; restore the checkpoint's own config.json"
            )
    if not 1 <= family.top_k(config) <= experts:
        raise CheckpointError(
            f"{place}: num_experts_per_tok is {family.top_k(config)}; wanted 1 to {experts}"
        )
    embedding = next(
        (t for name, t in checkpoint.tensors.items() if name.endswith("embed_tokens.weight")), None
    )
    wanted = (config.vocab_size, config.hidden_size)
    if embedding is not None and tuple(embedding.shape) != wanted:
        raise CheckpointError(
            f"{place}: vocab_size and hidden_size are {wanted}, and {embedding.name} is "
            f"{tuple(embedding.shape)}; restore the checkpoint's own config.json"
        )
