"""Which keys may differ between a run's recipe and the one that ``--resume`` is given."""

from collections.abc import Iterator
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import Recipe

CHANGEABLE = (
    "evaluation",
    "export",
    "method.strength",
    "data.num_proc",
    "trainer.report_to",
    "trainer.run_name",
    "trainer.disable_tqdm",
    "trainer.per_device_eval_batch_size",
    "trainer.dataloader_num_workers",
)
"""Keys, with all below them, that do not affect steps already trained."""
CHANGEABLE_PREFIXES = ("trainer.eval_", "trainer.log_", "trainer.logging_", "trainer.save_")


def check_resumable(saved: Recipe, resumed: Recipe, where: str) -> list[str]:
    """The dotted keys that differ; none of them changes steps that are already trained.

    Args:
        where: the file of ``saved``.

    Raises:
        RecipeError: other keys differ; the message names them.
    """
    old, new = (dict(_leaves(recipe.to_mapping(), "")) for recipe in (saved, resumed))
    changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    if fixed := [key for key in changed if not _changeable(key)]:
        lines = [f"  {key}: {_short(old, key)}, now {_short(new, key)}" for key in fixed]
        raise RecipeError(
            f"--resume: the recipe differs from {where}, which started this run, in keys that "
            "affect the steps already trained:\n"
            + "\n".join(lines)
            + "\nrestore them, or choose another --output"
        )
    return changed


def _changeable(key: str) -> bool:
    if key.startswith(CHANGEABLE_PREFIXES):
        return True
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif value != {}:
        yield key, value


def _short(values: dict[str, Any], key: str) -> str:
    return f"{values[key]!r:.60}" if key in values else "not set"
