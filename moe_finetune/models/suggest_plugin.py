"""Suggest a plugin for a model type that no family supports, from facts in its class."""

from collections.abc import Mapping
from typing import Any

from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models.class_structure import sites, without_weights
from moe_finetune.models.module_places import places_of

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
        class_sites = sites(without_weights(parsed))
    except (CheckpointError, ValueError, TypeError, AttributeError, KeyError):
        return None
    if not class_sites:
        return None
    try:
        places_of(parsed)
    except UnsupportedModelError as error:
        return f"a plugin can register it only if this is solved: {error}"
    return (
        f"transformers' class of '{model_type}' has the standard experts interface, so a plugin "
        "can register it: save this as my_family.py, correct the marked facts by the class's "
        "code, and test them with\n"
        "  moe-finetune inspect CHECKPOINT --prove --plugin my_family.py\n"
        + code(parsed, bool(class_sites[-1].biases))
    )


def code(config: Any, has_bias: bool) -> str:
    """A plugin's code for ``config``; what the class does not show is marked.

    Defaults of :class:`Family` are omitted.
    """
    name = config.model_type
    renormalize = next((name for name in _RENORMALIZE if hasattr(config, name)), None)
    scaling = next((name for name in _SCALING if hasattr(config, name)), None)
    lines = [
        f"name={name!r}, model_type={name!r}, title={name!r},",
        'score="softmax",  # correct: softmax or sigmoid over the experts',
        f"renormalize={_read(renormalize, 'True')},  # correct: weights of sum 1?",
        f"scaling={_read(scaling, '1.0')},  # correct: factor on the weights",
    ]
    if hasattr(config, "n_group") and hasattr(config, "topk_group"):
        lines.append("groups=expert_groups,  # correct: groups of experts, and how many to use")
    if has_bias:
        lines.append('bias_export="tensor",')
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "from moe_finetune.models import Family, register_family\n"
        "from moe_finetune.models.family import expert_groups\n"
        f"register_family(Family(\n{body}\n))"
    )


def _read(name: str | None, value: str) -> str:
    """A function of the config: its key ``name``, or always ``value``."""
    return f"lambda config: {f'config.{name}' if name else value}"
