"""Suggest a declaration for a model type that no family supports, from facts in its class."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import yaml
from torch import nn

from moe_finetune.models.layout import Site, sites
from moe_finetune.models.structure import patterns_on_disk
from moe_finetune.recipe.family import DiskSection, FamilySection
from moe_finetune.recipe.section import Section

_ASK = "  # declare"
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k", "moe_k")
_RENORMALIZE = ("norm_topk_prob", "route_norm", "normalize_topk", "norm_expert_weight")
_SCALING = ("routed_scaling_factor", "route_scale", "router_scaling_factor")


def suggestion(config: Mapping[str, Any]) -> str | None:
    """The part of an error message that shows how to declare the model type, or None.

    Args:
        config: the content of ``config.json``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from moe_finetune.errors import CheckpointError
    from moe_finetune.models.structure import meta_model

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    if "text_config" in config:
        return (
            f"a '{model_type}' combines several models, and of that kind only some types can be "
            "trained (docs/models.md); give a checkpoint of its language model"
        )
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(dict(config))
        class_sites = sites(meta_model(parsed))
    except (CheckpointError, ValueError, TypeError, AttributeError, KeyError):
        return None
    if not class_sites or not class_sites[0].routers:
        return None
    lines = "\n".join(f"    {line}" for line in declaration(parsed, class_sites))
    return (
        f"transformers' class of '{model_type}' has the standard experts interface, so a recipe "
        "can declare it: paste this, correct the marked facts by its code, and test them with\n"
        "  moe-finetune inspect CHECKPOINT --recipe RECIPE --prove\n"
        f"model:\n  family:\n{lines}"
    )


def declaration(config: Any, class_sites: Sequence[Site]) -> list[str]:
    """The lines of ``model.family`` for ``config``; facts that the class does not show are marked.

    Defaults of :class:`FamilySection` are omitted.
    """
    site = class_sites[-1]
    router, weight = site.routers[0]
    facts: dict[str, Any] = {"model_type": config.model_type}
    facts["score"] = f"softmax{_ASK}: softmax or sigmoid over the experts"
    facts["renormalize"] = f"{_key(config, _RENORMALIZE, 'true')}{_ASK}: weights of sum 1?"
    facts["scaling"] = f"{_key(config, _SCALING, '1.0')}{_ASK}: factor on the weights"
    grouped = hasattr(config, "n_group") and hasattr(config, "topk_group")
    if grouped:
        facts["groups"] = f"[n_group, topk_group]{_ASK}: groups of experts, and how many to use"
    read_facts = {
        "num_experts": _named(config, site.num_experts, "expert"),
        "top_k": _key(config, TOP_K, "num_experts_per_tok"),
        "expert_width": _named(config, site.width, "intermediate"),
        "block_path": site.block_path,
        "router_name": router,
        "router_weight": weight,
        "experts_name": site.experts_name,
        "gated": site.gated,
        "attention_targets": _attention(class_sites),
        "shared_targets": [*site.other_linears, *site.beside(())],
        "disk": _unlike(DiskSection, _disk(config, site, f"{router}.{weight}")),
    }
    facts |= {key: _flow(value) for key, value in _unlike(FamilySection, read_facts).items()}
    return [f"{key}: {value}" for key, value in facts.items()]


def _unlike(section: type[Section], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The ``facts`` that differ from the section's defaults."""
    defaults = {name: field.default for name, field in section.model_fields.items()}
    return {name: fact for name, fact in facts.items() if fact not in ([], {}, defaults[name])}


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).split(
        "\n"
    )[0]


def _key(config: Any, names: tuple[str, ...], default: str) -> str:
    return next((name for name in names if hasattr(config, name)), default)


def _named(config: Any, size: int, word: str) -> str:
    """The config's key with value ``size``, preferably with ``word`` in it; else the number."""
    keys = [key for key, value in config.to_dict().items() if value == size and value is not True]
    keys.sort(key=lambda key: (word not in key, "moe" not in key, len(key)))
    return keys[0] if keys and word in keys[0] else str(size)


def _attention(class_sites: Sequence[Site]) -> list[str]:
    """The decoder layers' linear layers outside their blocks."""
    names = [
        name
        for site in class_sites
        for name, module in site.layer.named_modules()
        if isinstance(module, nn.Linear)
        and not name.startswith(f"{site.block_path}.")
        and "attn" in name.partition(".")[0]
    ]
    return list(dict.fromkeys(names))


def _disk(config: Any, site: Site, router: str) -> dict[str, Any]:
    """Names in the files, from transformers' conversion."""
    mapping = config.to_dict()
    loaded = f"model.layers.{site.index}.{site.block_path}".rstrip(".")
    stack = f"{loaded}.{site.experts_name}"
    names = {"router": patterns_on_disk(mapping, f"{loaded}.{router}")[0]}
    if site.biases:
        names["router_bias"] = patterns_on_disk(mapping, f"{loaded}.{site.biases[0]}")[0]
    first = patterns_on_disk(mapping, f"{stack}.{'gate_up_proj' if site.gated else 'up_proj'}")
    parts = ("gate", "up") if len(first) == 2 else ("gate_up",) if site.gated else ("up",)
    names |= dict(zip(parts, first, strict=True))
    names["down"] = patterns_on_disk(mapping, f"{stack}.down_proj")[0]
    block = _shared_prefix(list(names.values()))
    return {"block": block} | {key: name[len(block) + 1 :] for key, name in names.items()}


def _shared_prefix(names: list[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(same[0] for same in takewhile(lambda part: len(set(part)) == 1, parts))
