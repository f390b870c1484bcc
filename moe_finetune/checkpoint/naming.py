"""Layouts of files whose tensor names differ from those that the family's class saves.

Loaders accept several layouts: stacks instead of a matrix for each expert, a vision model's names
under a text config, names without the base model's prefix. transformers' conversions recognize
them; exports keep the files' names.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moe_finetune.models import Family
from moe_finetune.models.structure import (
    Spelling,
    loaded_names,
    pattern_of,
    pieces_on_disk,
    spelling_of,
)


def named_as_in(family: Family, config: Any, names: Iterable[str]) -> Family:
    """``family`` with the layout of files whose tensors are ``names``.

    Args:
        config: transformers' config of the checkpoint.
    """
    spelling = spelling_of(config, names)
    if spelling is None:
        return family
    patterns, stacks = _patterns(family, config, spelling)
    disk = family.disk
    if stacks:
        first, second = (stacks[parameter] for parameter in family.expert_parameters)
        experts = {"gate_up": first, "down": second}
        disk = replace(disk, interleaved=False)
    else:
        parts = ("gate_up", "down") if disk.fused else ("gate", "up", "down")
        declared = {part: getattr(disk, part) for part in parts}
        experts = {
            part: patterns[f"{disk.block}.{name}"] for part, name in declared.items() if name
        }
        if disk.interleaved and experts["gate_up"].endswith(family.expert_targets[0]):
            disk = replace(disk, interleaved=False)
    others = {
        name: patterns.get(f"{disk.block}.{name}", f"{disk.block}.{name}")
        for name in (disk.router, disk.router_bias, disk.expert_ids, *disk.per_expert)
        if name is not None
    }
    block = _common([*experts.values(), *others.values()])
    inside = {name: pattern[len(block) + 1 :] for name, pattern in others.items()}
    layout = replace(
        disk,
        block=block,
        router=inside[disk.router],
        router_bias=inside.get(disk.router_bias or ""),
        expert_ids=inside.get(disk.expert_ids or ""),
        per_expert=tuple(inside[name] for name in disk.per_expert),
        spelling=spelling,
    )
    for part, pattern in experts.items():
        layout = replace(layout, **{part: pattern[len(block) + 1 :]})  # type: ignore[arg-type]
    return replace(family, disk=layout)


def _patterns(
    family: Family, config: Any, spelling: Spelling
) -> tuple[dict[str, str], dict[str, str]]:
    """Names of a MoE layer's tensors, and of parameters stored whole: as saved -> in the files."""
    mapping, layers = config.to_dict(), family.moe_layers(config)
    patterns: dict[str, str] = {}
    stacks: dict[str, str] = {}
    # The first layers of some classes look experts up by token and have no bias.
    heads = tuple(f"{family.backbone}.layers.{layer}." for layer in {layers[0], layers[-1]})
    for loaded in loaded_names(mapping):
        if not loaded.startswith(heads):
            continue
        saved = [pattern_of(name) for name in pieces_on_disk(mapping, loaded)]
        stored = [pattern_of(name) for name in pieces_on_disk(mapping, loaded, spelling)]
        if len(saved) == len(stored):
            patterns.update(zip(saved, stored, strict=True))
        else:
            stacks[loaded.rpartition(".")[2]] = stored[0]
    return patterns, stacks


def _common(names: list[str]) -> str:
    """The longest dotted path with which all ``names`` begin."""
    paths = [name.split(".")[:-1] for name in names]
    same = zip(*paths, strict=False)
    shared = []
    for parts in same:
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
