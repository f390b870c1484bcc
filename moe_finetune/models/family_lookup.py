"""Find a family by its model type: the package's, or a plugin's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_finetune.io.run_folder import RunFolder, missing_plugins, recipe_of_run
from moe_finetune.models.composites import PARTS
from moe_finetune.models.family import FAMILIES, Family

log = logging.getLogger(__name__)
DENSE = (
    "ernie4_5", "glm4", "granite", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3",
)  # fmt: skip
"""Dense model types that are evaluated, so that a MoE is compared with its parent."""
MOE_OF = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense model types whose checkpoints `upcycle` joins -> the type of the MoE."""
_stands_for: dict[str, Family] = {}


def find_family(model_type: object, part: str | None = None) -> Family | None:
    """The family of this exact ``model_type``, also of a composite's language part, or None.

    ``part`` is that of the language part in a composite's config, "" if its class decides.
    """
    if not isinstance(model_type, str):
        return None  # of a config.json by hand
    if model_type in _stands_for:
        return _stands_for[model_type]
    candidates = [f for f in (*FAMILIES.values(), *PARTS) if f.model_type == model_type]
    fitting = [f for f in candidates if (part or f.part) == f.part]
    return fitting[0] if fitting else None


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
