"""Check declared facts against a stock model: places, sizes, router outputs and rule, names."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.models.base import Family
from moe_finetune.models.layout import Site, sites
from moe_finetune.models.routing_rule import declared_rule, nearest_groups, nearest_rule, selected
from moe_finetune.models.structure import patterns_on_disk, shapes_on_disk
from moe_finetune.training.proof_model import PARTS, Check, Seen, named_parts, watch

EXACT = 1e-5
"""Bound on the relative difference of float32 weights computed in another order."""


def fact_checks(model: nn.Module, family: Family) -> Iterator[list[Check]]:
    """Yield groups of checks; each group depends on the ones before it."""
    config: Any = model.config
    text = config.get_text_config()
    all_sites = sites(model)
    yield [_layers(family, text, all_sites), *_places(family, all_sites[0])]
    yield [*_sizes(family, text, all_sites[0]), _router_weight(family, all_sites[0])]
    seen = watch(model, family)
    yield [_answer(family, seen[0])]
    yield [_used(family, layer) for layer in seen[-1:]]
    yield list(_rules(family, text, seen))
    yield list(_shared(family, all_sites)) + list(_attention(family, all_sites))
    yield list(_names(family, config, all_sites))


def _wrong(name: str, declared: Any, real: str) -> Check:
    return Check(name, problem=f"{name} is declared as {declared!r}, but {real}")


def _same(name: str, declared: Any, real: Any, actual: str) -> Check:
    return Check(name) if declared == real else _wrong(name, declared, actual)


def _layers(family: Family, text: Any, all_sites: Sequence[Site]) -> Check:
    declared, real = list(family.moe_layers(text)), [site.index for site in all_sites]
    return _same("moe_layers", declared, real, f"the model has experts in layers {real}")


def _places(family: Family, site: Site) -> Iterator[Check]:
    path = f"{site.block_path}.{site.experts_name}".lstrip(".")
    actual = f"the model has its experts at '{path}'"
    yield _same("block_path", family.block_path, site.block_path, actual)
    yield _same("experts_name", family.experts_name, site.experts_name, actual)
    routers, declared = [name for name, _ in site.routers], family.router_name
    actual = f"the weight with one row per expert is in {routers} of '{site.block_path}'"
    yield Check("router_name") if declared in routers else _wrong("router_name", declared, actual)


def _sizes(family: Family, text: Any, site: Site) -> Iterator[Check]:
    for name, declared, real in (
        ("num_experts", family.num_experts(text), site.num_experts),
        ("expert_width", family.expert_width(text), site.width),
    ):
        yield _same(name, declared, real, f"the model's experts have {real}")


def _router_weight(family: Family, site: Site) -> Check:
    paths = [path for name, path in site.routers if name == family.router_name]
    if family.router_weight not in paths:
        return _wrong("router_weight", family.router_weight, f"the model has it at '{paths[0]}'")
    return Check("router_weight")


def _answer(family: Family, layer: Seen) -> Check:
    """Check the order of the router's outputs: an integer index, and logits of all experts."""
    answer = layer.answers[0]
    outputs = answer if isinstance(answer, tuple) else (answer,)
    order = tuple(_part(tensor, layer.site.num_experts) for tensor in outputs)
    declared = family.router_returns
    if len(declared) != len(order) or any(
        name != part for name, part in zip(declared, order, strict=True) if name in PARTS
    ):
        return _wrong("router_returns", family.router_returns, f"the router returns {order}")
    return Check("router_returns")


def _part(tensor: Any, experts: int) -> str:
    if not tensor.is_floating_point():
        return "index"
    return "logits" if tensor.shape[-1] == experts else "weights"


def _used(family: Family, layer: Seen) -> Check:
    """Check that the block passes the router's weights and index to its experts."""
    named, (index, weights) = named_parts(family, layer), layer.given[0]
    if not torch.equal(index.reshape(named["index"].shape), named["index"]):
        return Check("router's index", problem=
            "the block gives its experts another index than its router returned; this type "
            "needs its own code")  # fmt: skip
    difference = float((weights.reshape(named["weights"].shape) - named["weights"]).abs().max())
    difference /= float(named["weights"].abs().max())
    problem = None
    if difference > EXACT:
        problem = (
            f"the block gives its experts weights that differ by {difference:.1e} from those "
            "that its router returned; this type needs its own code"
        )
    return Check("weights that are used", difference, EXACT, problem)


def _rules(family: Family, text: Any, seen: Sequence[Seen]) -> Iterator[Check]:
    named = [named_parts(family, layer) for layer in seen]
    logits, weights, index = (
        torch.cat([layer[part] for layer in named]) for part in ("logits", "weights", "index")
    )
    if family.top_k(text) != index.shape[1]:
        yield _wrong("top_k", family.top_k(text), f"the router selects {index.shape[1]}")
        return
    if family.own_weights is not None:
        yield Check("rule of the weights", note=f"none: {family.own_weights}")
        return
    rule = declared_rule(family, text, logits, weights, index)
    nearest = nearest_rule(logits, weights, index)
    if rule.difference <= EXACT:
        yield Check("rule of the weights", rule.difference, EXACT, note=str(rule))
    else:
        yield from _differences(rule, nearest)
    if rule.difference <= EXACT:
        yield from _selection(family, text, seen, named)


def _differences(rule: Any, nearest: Any) -> Iterator[Check]:
    if nearest.difference > EXACT:
        yield Check(
            "rule of the weights",
            rule.difference,
            EXACT,
            problem=f"the weights match no known score of the logits (declared: {rule}; nearest: "
            f"{nearest}, off by {nearest.difference:.1e})",
        )
        return
    for name in ("score", "renormalize"):
        declared, real = getattr(rule, name), getattr(nearest, name)
        if declared != real:
            yield _wrong(name, declared, f"the model's weights are {nearest}")
    if abs(rule.scaling - nearest.scaling) > EXACT * abs(nearest.scaling):
        yield _wrong("scaling", rule.scaling, f"the model's weights are {nearest}")


def _selection(
    family: Family, text: Any, seen: Sequence[Seen], named: Sequence[dict[str, Tensor]]
) -> Iterator[Check]:
    groups, fixed = family.groups(text), set(family.fixed_layers(text))
    free = [pair for pair in zip(seen, named, strict=True) if pair[0].site.index not in fixed]
    wrong_bias = _bias(family, text, free[0][0].site) if free else None
    if wrong_bias is not None:
        yield wrong_bias
        return
    for layer, parts in free:
        bias = _held_bias(layer.site)
        index_TK = parts["index"].sort(-1).values
        reselected_TK = selected(family.score, parts["logits"], bias, index_TK.shape[1], groups)
        if torch.equal(reselected_TK, index_TK):
            continue
        real = nearest_groups(family.score, parts["logits"], bias, index_TK)
        if real is None:
            yield Check(
                "selection",
                problem="the model's selection follows from neither groups nor a bias that this "
                "toolkit knows; this type needs its own code",
            )
        else:
            yield _wrong("groups", groups, f"the model selects from {real[1]} of {real[0]} groups")
        return
    yield Check("bias")
    yield Check("groups", note=f"{groups[1]} of {groups[0]}")


def _held_bias(site: Site) -> Tensor | None:
    tensors = dict([*site.block.named_parameters(), *site.block.named_buffers()])
    return tensors[site.biases[0]].detach().flatten() if site.biases else None


def _bias(family: Family, text: Any, site: Site) -> Check | None:
    """Check ``disk.router_bias``; an undeclared bias is a problem."""
    declared = family.disk.router_bias
    if declared is None and site.biases:
        return _wrong(
            "disk.router_bias",
            None,
            f"the block has one value per expert in '{site.biases[0]}', added for the selection",
        )
    if declared is not None and not site.biases and family.bias_export != "noaux_tc":
        return _wrong("disk.router_bias", declared, "the block has no value per expert")
    return None


def _shared(family: Family, all_sites: Sequence[Site]) -> Iterator[Check]:
    """Check linear layers of the block, and those of the layer outside block and attention."""
    attention = {target.partition(".")[0] for target in family.attention_targets}
    real = {name for site in all_sites for name in site.other_linears}
    real |= {name for site in all_sites for name in site.next_to(attention)}
    if undeclared := sorted(real - set(family.shared_targets)):
        yield _wrong("shared_targets", family.shared_targets, f"the layers also have {undeclared}")
    else:
        yield Check("shared_targets", note=f"{len(real)} linear layers")


def _attention(family: Family, all_sites: Sequence[Site]) -> Iterator[Check]:
    modules = {name for site in all_sites for name, _ in site.layer.named_modules()}
    if matched := modules & set(family.attention_targets):
        yield Check("attention_targets", note=f"{len(matched)} linear layers")
    else:
        real = sorted(
            name
            for name, module in all_sites[0].layer.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(f"{family.block_path}.")
        )
        yield _wrong("attention_targets", family.attention_targets, f"the layers have {real}")


def _names(family: Family, config: Any, all_sites: Sequence[Site]) -> Iterator[Check]:
    """Check that transformers writes each of the family's names on disk."""
    stored, disk = shapes_on_disk(config), family.disk
    mapping = config.to_dict()
    names = {"router": f"{family.router_name}.{family.router_weight}"}
    if disk.router_bias is not None and all_sites[0].biases:
        names["router_bias"] = all_sites[0].biases[0]
    first = family.expert_parameters[0]
    names |= dict.fromkeys(disk.parts(first), f"{family.experts_name}.{first}")
    names["down"] = f"{family.experts_name}.down_proj"
    site = all_sites[0]
    for part, loaded in names.items():
        if getattr(disk, part) is None:
            yield _wrong(f"disk.{part}", None, f"the model has '{loaded}'")
            return
        name = disk.name(part, site.index, site.num_experts - 1)
        if name not in stored:
            layer = f"{family.backbone}.layers.{site.index}"
            path = ".".join(filter(None, (layer, family.block_path, loaded)))
            real = patterns_on_disk(mapping, path)
            yield _wrong(f"disk.{part}", getattr(disk, part), f"the files call it {real}")
            return
    yield Check("names on disk", note=f"{len(names)} kinds")
