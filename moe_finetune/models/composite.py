"""Composites: checkpoints of several models, one of them a language model with experts.

transformers nests a config of each part in the composite's. The language part trains on text; other
parts, such as a vision tower, stay unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moe_finetune.models.base import Family

_OF_THE_CONFIG = (
    "num_experts",
    "renormalize",
    "scaling",
    "groups",
    "top_k",
    "moe_layers",
    "fixed_layers",
    "expert_width",
    "separate_spaces",
    "check",
)


def composite(
    model_type: str,
    title: str,
    part: Family,
    stack: str = "model.language_model.",
    backbone: str = "model.language_model",
    name: str = "",
    **disk: Any,
) -> Family:
    """The family of a composite around ``part``.

    Args:
        model_type: of the composite's config.
        title: its name in the README.
        part: the facts of its language part.
        stack: prefix of ``layers`` in the composite's files, instead of ``model.``.
        backbone: path of the decoder in the loaded model.
        name: the family's name, if not the ``model_type``.
        disk: fields of the layout on disk that differ from the part's.
    """
    block = stack + "layers." + part.disk.block.partition("layers.")[2]
    facts: dict[str, Any] = {name: _of_language(getattr(part, name)) for name in _OF_THE_CONFIG}
    return replace(
        part,
        name=name or model_type,
        model_type=model_type,
        title=title,
        part=part.model_type,
        backbone=backbone,
        disk=replace(part.disk, **({"block": block} | disk)),
        **facts,
    )


def _of_language(fact: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda config: fact(config.get_text_config())


def part_of(config: Any) -> str | None:
    """The ``model_type`` of the language part of a config or ``config.json``; None without one.

    For a ``config.json`` also None if only the composite's class names the part.
    """
    if isinstance(config, Mapping):
        text = config.get("text_config")
        return text.get("model_type") if isinstance(text, Mapping) else None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return None if text is config else str(text.model_type)


def language_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of ``config.json`` that describe the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
