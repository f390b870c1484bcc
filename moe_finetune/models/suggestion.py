"""Suggest a plugin for a model type that no family supports, from facts in its class."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.models.base import Family
from moe_finetune.models.structure import Site, linears, meta_model, sites

_RENORMALIZE = ("norm_topk_prob", "route_norm", "normalize_topk", "norm_expert_weight")
_SCALING = ("routed_scaling_factor", "route_scale", "router_scaling_factor")


def suggestion(config: Mapping[str, Any]) -> str | None:
    """The part of an error message that shows how to register the model type, or None.

    Args:
        config: the content of ``config.json``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
    return (
        f"transformers' class of '{model_type}' has the standard experts interface, so a plugin "
        "can register it: save this as my_family.py, correct the marked facts by the class's "
        "code, and test them with\n"
        "  moe-finetune inspect CHECKPOINT --prove --plugin my_family.py\n"
        + code(parsed, class_sites)
    )


def code(config: Any, class_sites: Sequence[Site]) -> str:
    """A plugin's code for ``config``; facts that the class does not show are marked.

    Defaults of :class:`Family` are omitted.
    """
    site, name = class_sites[-1], config.model_type
    router, weight = site.routers[0]
    renormalize = next((name for name in _RENORMALIZE if hasattr(config, name)), None)
    scaling = next((name for name in _SCALING if hasattr(config, name)), None)
    class_facts = {
        "block_path": site.block_path,
        "router_name": router,
        "router_weight": weight,
        "experts_name": site.experts_name,
        "gated": site.gated,
        "shared_targets": (*site.other_linears, *site.next_to(())),
        "bias_export": "tensor" if site.biases else "none",
    }
    lines = [
        f"name={name!r}, model_type={name!r}, title={name!r},",
        'score="softmax",  # correct: softmax or sigmoid over the experts',
        f"renormalize={_read(renormalize, 'True')},  # correct: weights of sum 1?",
        f"scaling={_read(scaling, '1.0')},  # correct: factor on the weights",
        f"attention_targets={tuple(_attention(class_sites))!r},",
    ]
    if hasattr(config, "n_group") and hasattr(config, "topk_group"):
        lines.insert(4, "groups=expert_groups,  # correct: groups of experts, and how many to use")
    for fact, size, word in (
        ("num_experts", site.num_experts, "expert"),
        ("expert_width", site.width, "intermediate"),
    ):
        try:
            is_default = _default(fact)(config) == size
        except AttributeError:
            is_default = False
        if not is_default:
            lines.append(f"{fact}={_read(*_named(config, size, word))},")
    others = {name: value for name, value in class_facts.items() if value != _default(name)}
    lines += [f"{name}={value!r}," for name, value in others.items()]
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "from moe_finetune.models import Family, register_family\n"
        "from moe_finetune.models.base import expert_groups\n"
        f"register_family(Family(\n{body}\n))"
    )


def _read(name: str | None, value: str = "") -> str:
    """A function of the config: its key ``name``, or always ``value``."""
    return f"lambda config: {f'config.{name}' if name else value}"


def _default(name: str) -> Any:
    return next(field.default for field in fields(Family) if field.name == name)


def _named(config: Any, size: int, word: str) -> tuple[str | None, str]:
    """The config's key with value ``size`` and ``word`` in it, if any; and the number."""
    keys = [key for key, value in config.to_dict().items() if value == size and value is not True]
    keys.sort(key=lambda key: (word not in key, "moe" not in key, len(key)))
    return (keys[0] if keys and word in keys[0] else None), str(size)


def _attention(class_sites: Sequence[Site]) -> list[str]:
    """The decoder layers' linear layers outside their blocks."""
    names = [
        name
        for site in class_sites
        for name, _ in linears(site.layer)
        if not name.startswith(f"{site.block_path}.") and "attn" in name.partition(".")[0]
    ]
    return list(dict.fromkeys(names))
