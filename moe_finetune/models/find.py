"""Find a family by its model type: the package's, a plugin's, or an installed package's.

An installed package has an entry point of the group :data:`GROUP`: a :class:`Family`, several, or
a callable that returns them. It is loaded when a checkpoint has a ``model_type`` that is unknown.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.io.run_folder import RunFolder, missing_plugins, recipe_of_run
from moe_finetune.models.base import FAMILIES, Family
from moe_finetune.models.composites import PARTS

log = logging.getLogger(__name__)
GROUP = "moe_finetune.families"
_stands_for: dict[str, Family] = {}


def find_family(model_type: object, part: str | None = None) -> Family | None:
    """The family of this exact ``model_type``; None if there is none.

    Args:
        model_type: of a config, also of a composite's language part.
        part: ``model_type`` of the language part in a composite's config, "" if its class decides.

    Raises:
        UnsupportedModelError: a plugin cannot be loaded.
    """
    if not isinstance(model_type, str):
        return None  # of a config.json by hand
    if model_type in _stands_for:
        return _stands_for[model_type]
    candidates = [f for f in (*FAMILIES.values(), *PARTS) if f.model_type == model_type]
    fitting = [f for f in candidates if (part or f.part) == f.part]
    return fitting[0] if fitting else _plugins().get(model_type)


def known_families() -> dict[str, Family]:
    """Every supported family by name."""
    return _plugins() | dict(FAMILIES.items())


def warn_of_plugins(source: str | Path) -> None:
    """Name the plugin files that the run of ``source`` was trained with and that are not given."""
    recipe = recipe_of_run(source)
    missing = [] if recipe is None else missing_plugins(RunFolder(recipe.parent))
    if missing:
        log.warning(
            "%s was trained with --plugin %s, which is not given now; where its model type or a "
            "loss is unknown, give the file again",
            source,
            ", ".join(missing),
        )


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
