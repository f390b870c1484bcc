"""Families declared outside the package: by a recipe's ``model.family`` or by plugins.

A plugin is an entry point of the group :data:`GROUP`: a :class:`Family`, several, or a callable
that returns them. It is loaded when a checkpoint has a ``model_type`` that the package lacks.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from moe_finetune.errors import RecipeError, UnsupportedModelError, did_you_mean
from moe_finetune.io.run_folder import RunFolder, missing_plugins, recipe_of_run
from moe_finetune.models.base import FAMILIES, DiskLayout, Family
from moe_finetune.models.structure import layers_with_experts
from moe_finetune.models.table import PARTS
from moe_finetune.recipe.family import DECLARED, FamilySection
from moe_finetune.recipe.schema import load_recipe

log = logging.getLogger(__name__)
GROUP = "moe_finetune.families"
_stands_for: dict[str, Family] = {}


def find_family(model_type: object, part: str | None = None) -> Family | None:
    """The family of this exact ``model_type``: the package's, a plugin's, or a recipe's.

    Args:
        model_type: of a config, also of a composite's language part.
        part: ``model_type`` of the language part in a composite's config, "" if its class decides.

    Raises:
        RecipeError: a recipe declares a type that is already known.
        UnsupportedModelError: a plugin cannot be loaded.
    """
    if not isinstance(model_type, str):
        return None  # of a config.json by hand
    if model_type in _stands_for:
        return _stands_for[model_type]
    section = DECLARED.get(model_type)
    candidates = [f for f in (*FAMILIES.values(), *PARTS) if f.model_type == model_type]
    fitting = [f for f in candidates if (part or f.part) == f.part]
    family = fitting[0] if fitting else None
    if family is None:
        family = _plugins().get(model_type)
    if section is None or family is None:
        return family if section is None else family_from(section)
    raise RecipeError(
        f"model.family.model_type: '{model_type}' is already supported as {family.title}; leave "
        "model.family out"
    )


def known_families() -> dict[str, Family]:
    """Every supported family by name."""
    return _plugins() | dict(FAMILIES.items())


def declare_family_of(source: str | Path) -> None:
    """Register the family that a run's recipe declares; ``source`` is in the run's folder.

    Raises:
        RecipeError: the run's recipe was changed and is invalid.
    """
    recipe = recipe_of_run(source)
    missing = [] if recipe is None else missing_plugins(RunFolder(recipe.parent))
    if missing:
        log.warning(
            "%s was trained with --plugin %s, which is not given now; where its model type or a "
            "loss is unknown, give the file again",
            source,
            ", ".join(missing),
        )
    if recipe is not None and b"\n  family:\n" in recipe.read_bytes():
        load_recipe(recipe)


@contextmanager
def using(family: Family) -> Iterator[None]:
    """Use ``family`` for its ``model_type`` inside the context, overriding other registrations."""
    types = [family.model_type, *([family.part] if family.part else [])]
    previous = {name: _stands_for[name] for name in types if name in _stands_for}
    _stands_for.update(dict.fromkeys(types, family))
    try:
        yield
    finally:
        for name in types:
            del _stands_for[name]
        _stands_for.update(previous)


def family_from(section: FamilySection) -> Family:
    """Convert a recipe's ``model.family`` to a :class:`Family`."""
    first, second = section.groups
    groups = _fact(section, "groups", first, int), _fact(section, "groups", second, int)
    return Family(
        name=section.model_type,
        model_type=section.model_type,
        title=section.title or section.model_type,
        score=section.score,
        attention_targets=section.attention_targets,
        shared_targets=section.shared_targets,
        disk=DiskLayout(**section.disk.model_dump()),
        block_path=section.block_path,
        router_name=section.router_name,
        router_weight=section.router_weight,
        router_returns=section.router_returns,
        router_logits=section.router_logits,
        gated=section.gated,
        experts_name=section.experts_name,
        num_experts=_fact(section, "num_experts", section.num_experts, int),
        renormalize=_fact(section, "renormalize", section.renormalize, bool),
        scaling=_fact(section, "scaling", section.scaling, float),
        groups=lambda config: (groups[0](config) or 1, groups[1](config) or 1),
        top_k=_fact(section, "top_k", section.top_k, int),
        moe_layers=layers_with_experts,
        expert_width=_fact(section, "expert_width", section.expert_width, int),
        bias_export="none" if section.disk.router_bias is None else "tensor",
        rows=section.rows,
    )


def _fact(
    section: FamilySection, name: str, value: Any, kind: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A function of the config that returns the key named ``value``, or ``value`` itself."""
    if not isinstance(value, str):
        return lambda config: kind(value)

    def read(config: Any) -> Any:
        if not hasattr(config, value):
            raise UnsupportedModelError(
                f"model.family.{name}: the config of {section.model_type} has no '{value}'"
                f"{did_you_mean(value, config.to_dict())}"
            )
        return kind(getattr(config, value) or 0)

    return read


@lru_cache(maxsize=1)
def _plugins() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for point in entry_points(group=GROUP):
        for family in _families_of(point):
            duplicates = [
                registered
                for registered in FAMILIES.values()
                if registered.model_type == family.model_type
            ]
            if duplicates or family.model_type in families:
                raise UnsupportedModelError(
                    f"plugin '{point.name}' ({point.value}): model_type '{family.model_type}' is "
                    "already supported; remove the plugin, or its declaration of that type"
                )
            families[family.model_type] = family
    return families


def _families_of(point: Any) -> Iterable[Family]:
    try:
        loaded = point.load()
        if callable(loaded):
            loaded = loaded()
    except Exception as error:  # whatever the plugin's own code raises
        raise UnsupportedModelError(
            f"plugin '{point.name}' ({point.value}) of {GROUP} cannot be loaded: "
            f"{type(error).__name__}: {error}; fix or uninstall it"
        ) from error
    families = [loaded] if isinstance(loaded, Family) else loaded
    if not isinstance(families, Iterable) or not all(isinstance(f, Family) for f in families):
        raise UnsupportedModelError(
            f"plugin '{point.name}' ({point.value}) of {GROUP} gave {loaded!r:.80}; it must be a "
            "Family, several of them, or a callable that returns them"
        )
    return families
