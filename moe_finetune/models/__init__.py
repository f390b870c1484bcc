"""Model families: exact ``model_type`` -> how scores become weights, and what packed rows need.

A family is a row of one of the tables. If transformers has no class for it, the package has one,
such as :mod:`moe_finetune.models.deepseek_moe`.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import composites, family_table, newer_families
from moe_finetune.models.class_structure import part_of
from moe_finetune.models.family import FAMILIES, Family
from moe_finetune.models.family_lookup import DENSE, find_family, using
from moe_finetune.plugins import installed_names
from moe_finetune.registry import old_declaration

ROWS = (*family_table.CORE, *family_table.FAMILIES, *composites.FAMILIES, *newer_families.FAMILIES)
"""The package's families, those of newer transformers versions included."""

OURS = tuple(family for family in ROWS if family.available)
"""Those that the installed version has."""

for _family in OURS:
    FAMILIES.register(_family.name, _family)

__all__ = [
    "FAMILIES",
    "Family",
    "check_supported",
    "family_of",
    "family_of_model",
    "find_family",
    "opened_as",
    "register_family",
    "using",
]


def family_of(config: Any, folder: Path | None = None) -> Family:
    """The family of a transformers config (or of ``folder``'s ``config.json``, a mapping)."""
    mapping = isinstance(config, dict)
    model_type = config.get("model_type") if mapping else getattr(config, "model_type", None)
    family = find_family(model_type, part_of(config))
    if family is None:
        prefix = "" if folder is None else f"{folder}: "
        raise UnsupportedModelError(prefix + _refusal(config if mapping else config.to_dict()))
    if mapping and family in composites.PARTS:
        composite = next(f.model_type for f in FAMILIES.values() if f.part == model_type)
        raise UnsupportedModelError(
            f"model_type '{model_type}': transformers supports this language model only as part "
            f"of '{composite}'; give the complete checkpoint"
        )
    if not mapping:
        family.check(config)
    return family


def register_family(family: Family) -> Family:
    """Add a family, in a plugin: its ``model_type`` is then supported like ours.

    Raises:
        UnsupportedModelError: the type, or the family's name, is already taken.
    """
    same = [f for f in FAMILIES.values() if f.model_type == family.model_type]
    if any(other.part == family.part for other in same) or family.name in FAMILIES:
        raise UnsupportedModelError(
            f"register_family: model_type '{family.model_type}' is already supported"
        )
    return FAMILIES.register(family.name, family)


def check_supported(config: Any, family: Family) -> None:
    """Check the transformers config of a ``config.json`` whose family is known."""
    if part_of(config) not in (None, family.part):
        raise UnsupportedModelError(_refusal(config.to_dict()))
    try:
        family.top_k(config)
    except (AttributeError, KeyError, TypeError) as error:  # of a plugin's function
        raise UnsupportedModelError(
            f"family '{family.name}', top_k: {error}; correct the function of its Family"
        ) from error
    family.check(config)
    family.places(config)


def opened_as(family: Family, model: Any) -> Any:
    """``model``, with a note of its family, which was found when its checkpoint was opened.

    Refused where transformers' class lacks an option of the config, such as ``topk_method:
    noaux_tc``, with which :func:`open_checkpoint` opens exports for vLLM.
    """
    family.check(model.config)
    model.moe_family = family
    return model


def family_of_model(model: Any) -> Family:
    """The noted family of a transformers model, or by its config if another program built it."""
    return getattr(model, "moe_family", None) or family_of(model.config)


def _refusal(config: dict[str, Any]) -> str:
    from moe_finetune.models.suggest_plugin import suggestion

    model_type = config.get("model_type")
    parts = [f.part for f in FAMILIES.values() if f.part and f.model_type == model_type]
    if parts:
        return (
            f"'{model_type}' is supported with a language model of type {' or '.join(parts)}, "
            f"but this checkpoint's is '{part_of(config)}'"
        )
    for row in ROWS:
        if row.model_type == model_type and not row.available:
            return f"'{model_type}' needs transformers {row.since} or newer; install it"
    if isinstance(model_type, str) and model_type in composites.REFUSED:
        return f"'{model_type}' cannot be trained: {composites.REFUSED[model_type]}"
    text = config.get("text_config") or {}
    keys = " ".join([*config, *(text if isinstance(text, dict) else ())])
    if "expert" not in keys and _known(model_type):
        evaluated = "`eval` compares it with a MoE, and " if model_type in DENSE else ""
        return (
            f"model_type '{model_type}' is dense: there is no expert to train and no routing to "
            f"trace; {evaluated}`moe-finetune upcycle` makes a MoE of dense checkpoints"
        )
    model_types = sorted({family.model_type for family in FAMILIES.values()})
    near = _near(str(model_type), model_types)
    remedy = near or suggestion(config)
    installed = ", ".join(installed_names())
    lines = [
        f"model_type '{model_type}' is not supported{near}{old_declaration()}",
        f"installed plugins: {installed}; if one has it, add --plugin NAME" if installed else None,
        None if near else remedy,
        None if remedy else f"docs/models.md lists the {len(model_types)} supported types",
    ]
    return "\n".join(line for line in lines if line)


def _known(model_type: Any) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _near(model_type: str, names: Iterable[str]) -> str:
    """The supported type that a misspelled one resembles; a type of transformers is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = list(names)
    near = [name for name in names if name.startswith(f"{model_type}_")][:1]
    near = near or difflib.get_close_matches(model_type, names, n=1, cutoff=0.8)
    return f"; did you mean '{near[0]}'?" if near and model_type not in CONFIG_MAPPING else ""
