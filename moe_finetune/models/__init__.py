"""Model families: exact ``model_type`` -> where the router and the experts are, and how they score.

Add a family that follows the common interface with a row in ``table.py``; one that needs code with
a file that builds a :class:`Family` and one line in ``_ALL`` below.
"""

from __future__ import annotations

from typing import Any

from moe_finetune.errors import UnsupportedModelError, did_you_mean
from moe_finetune.models import (
    autonomy,
    deepseek_moe,
    deepseek_v2,
    mixtral,
    moonlight,
    olmoe,
    qwen3_moe,
    table,
)
from moe_finetune.models.base import FAMILIES, DiskLayout, Family
from moe_finetune.models.composite import part_of
from moe_finetune.models.declared import find_family, known_families, using

_ALL = (deepseek_moe, deepseek_v2, moonlight, qwen3_moe, olmoe, mixtral, autonomy)
for _module in _ALL:
    FAMILIES.register(_module.FAMILY.name, _module.FAMILY)
for _family in (*table.FAMILIES, *table.COMPOSITES):
    FAMILIES.register(_family.name, _family)

__all__ = ["FAMILIES", "DiskLayout", "Family", "family_of", "find_family", "using"]


def family_of(config: Any) -> Family:
    """Return the family of a transformers config (or of a ``config.json`` mapping).

    Raises:
        UnsupportedModelError: no family has this exact ``model_type``, or the family refuses an
            option of this config.
    """
    mapping = isinstance(config, dict)
    model_type = config.get("model_type") if mapping else getattr(config, "model_type", None)
    family = find_family(model_type, part_of(config))
    if family is None:
        raise UnsupportedModelError(_refusal(config if mapping else config.to_dict()))
    if mapping and family in table.PARTS:
        whole = next(f.model_type for f in FAMILIES.values() if f.part == model_type)
        raise UnsupportedModelError(
            f"model_type '{model_type}': transformers has this language model only as a part "
            f"of '{whole}'; give the whole checkpoint"
        )
    if not mapping:
        family.check(config)
    return family


def _refusal(config: dict[str, Any]) -> str:
    from moe_finetune.models.suggestion import suggestion

    model_type = config.get("model_type")
    parts = [f.part for f in known_families().values() if f.part and f.model_type == model_type]
    if parts:
        return (
            f"a '{model_type}' is supported with a language part of type {' or '.join(parts)}, but "
            f"this one's is '{part_of(config)}'"
        )
    if isinstance(model_type, str) and model_type in table.REFUSED:
        return f"a '{model_type}' cannot be trained: {table.REFUSED[model_type]}"
    known = {family.model_type: family.title for family in known_families().values()}
    supported = ", ".join(f"{t} ({title})" for t, title in known.items())
    lines = [
        f"model_type '{model_type}' is not supported{did_you_mean(str(model_type), known)}",
        f"supported: {supported}",
        suggestion(config),
    ]
    return "\n".join(line for line in lines if line)
