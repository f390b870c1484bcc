"""Renumber the routed experts of a checkpoint; the model computes the same function."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output
from moe_finetune.models.config_and_tokenizer import local_folder
from moe_finetune.moe.layers import MoeLayer, moe_layers

Permutation = Mapping[int, Sequence[int]]
"""Decoder layer -> list; new expert i is old expert ``list[i]``."""


@torch.no_grad()
def permute_experts(base: str | Path, permutation: Permutation, output: Path) -> None:
    """Write ``base`` with the experts of some layers reordered; holds the whole model in memory.

    What the model's class does not load, such as an MTP head, is left out.

    Raises:
        CheckpointError: a layer has no experts, a list is not a permutation, it splits the groups
            of grouped routing, or the reordered model does not give the same logits.
    """
    check_output(output)
    folder = local_folder(base)
    model = load_model(folder, "auto").eval()
    layers = {layer.index: layer for layer in moe_layers(model)}
    ids = torch.arange(24)[None] % model.config.get_text_config().vocab_size
    before = model(ids).logits.float()
    for index, order in permutation.items():
        if index not in layers:
            raise CheckpointError(f"layer {index} has no experts; layers with: {sorted(layers)}")
        check(layers[index], order)
        for tensor in per_expert(layers[index], len(order)):
            # Rows after the routed experts' belong to shared experts, and stay.
            tensor[: len(order)] = tensor[list(order)].clone()
    after = model(ids).logits.float()
    if (after - before).norm() > 1e-2 * before.norm():
        raise CheckpointError(f"{folder}: reordering its experts changes what it computes")
    model.save_pretrained(output)
    for file in folder.iterdir():  # the tokenizer's
        if file.name.startswith(("token", "vocab", "merges", "special", "chat_template")):
            shutil.copy(file, output)


def per_expert(layer: MoeLayer, experts: int) -> list[Tensor]:
    """The tensors of a layer whose first dimension numbers the experts."""
    routing = {
        id(tensor): tensor
        for module in (layer.router, layer.block)
        for tensor in (*module.parameters(module is layer.router), *module.buffers(False))
        if len(tensor) == experts or (tensor.ndim == 2 and len(tensor) > experts)
    }
    return [*layer.experts.parameters(), *layer.experts.buffers(), *routing.values()]


def check(layer: MoeLayer, order: Sequence[int]) -> None:
    """Raise CheckpointError unless ``order`` can be applied to ``layer``."""
    config = layer.experts.config
    experts = layer.places.num_experts
    if sorted(order) != list(range(experts)):
        raise CheckpointError(
            f"layer {layer.index} must list each of 0-{experts - 1} once, got {len(order)} "
            f"entries, {len(set(order))} different"
        )
    if layer.index in layer.family.fixed_layers(config):
        raise CheckpointError(f"layer {layer.index} looks its experts up by token")
    groups, _ = layer.family.groups(config)
    size = experts // groups
    if any(len({old // size for old in order[i : i + size]}) > 1 for i in range(0, experts, size)):
        raise CheckpointError(
            f"layer {layer.index}: the plan mixes the {groups} routing groups (n_group) of {size} "
            "experts, so the model would route differently; keep each group together"
        )
